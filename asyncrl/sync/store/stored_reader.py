"""Reading the blobs of one learner rank into staging: whole tensors, or changes to what lies there.

    box of the rank   [ block | block | block | block ]
    needed                 └──────────┘                     read: blocks 0, 1 and 2, in one range

The reader takes whole blocks, each of some rows: all blocks of a box if it needs some columns, those of the needed rows
otherwise. Each block, or the record of its changes, is hashed before any of it goes to staging. A buffer of one bucket
is all the memory this takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from asyncrl.errors import WeightSyncError, WireError
from asyncrl.sync.delta.delta import add, cut
from asyncrl.sync.delta.records import most_bytes, read
from asyncrl.sync.layout.layout import ITEM_BYTES, Box
from asyncrl.sync.plan.plan import SourcePlan
from asyncrl.sync.store.blobs import Blobs
from asyncrl.sync.store.stored import (
    BLOCK_BYTES,
    ENTRY_BYTES,
    Manifest,
    StoredBlock,
    blocks,
    check_header,
    record_hash,
)
from asyncrl.sync.tensors.checksum import row_digest
from asyncrl.sync.tensors.shards import Shards


@dataclass(frozen=True, slots=True)
class Needed:
    """Bytes [start, stop) of a blob hold a block, or its changes. index: among all blocks · parts: needed ones."""

    start: int
    stop: int
    index: int
    block: StoredBlock
    parts: list[Box]


class StoredReader:
    """Fills `staging` for `who`. verify: compare the hash of each block with the manifest's."""

    def __init__(self, who: str, blobs: Blobs, staging: Shards, bucket_bytes: int, *, verify: bool) -> None:
        self._who, self._blobs, self._staging, self._verify = who, blobs, staging, verify
        self._buffer = torch.empty(max(bucket_bytes, most_bytes(BLOCK_BYTES)), dtype=torch.uint8)

    def take_full(self, source: SourcePlan, manifest: Manifest, key: str) -> int:
        """Read the pieces of `source` from the tensors `key` into staging. Returns their hash; 0 without verify.

        Raises:
            MissingBlobError
            WeightSyncError: the blob is torn, damaged or of other tensors
        """
        header = bytearray(manifest.header)
        self._blobs.read(key, 0, memoryview(header))
        check_header(bytes(header), manifest.layout, key)
        needed = _needed(source, manifest)
        total = 0
        # Elements of one type at a time, so that each block lies aligned in the buffer.
        for name, of_param in groupby(needed, key=lambda each: each.block.name):
            param = manifest.layout[name]
            for each, data in self._read(key, list(of_param)):
                box = each.block.box
                values = data.view(getattr(torch, param.dtype)).view(box.shape)
                hashed = self._checked(each.block, values, manifest, key)
                for part in each.parts:
                    found = values[part.within(box).slices()]
                    self._staging.view(name, part).copy_(found)
                    if hashed is not None:
                        total += hashed if part == box else row_digest(found, part, param.shape, name)
        return total

    def take_delta(self, source: SourcePlan, manifest: Manifest, key: str) -> int:
        """Add the changes `key` of the pieces of `source` to staging. Returns the bytes that were read.

        Raises as `take_full`. `check` then compares what lies in staging with the version.
        """
        try:
            return self._take_delta(source, manifest, key)
        except WireError as error:
            raise WeightSyncError(f"{self._who}: {key} at {self._blobs.where} is damaged: {error}") from error

    def check(self, source: SourcePlan, manifest: Manifest) -> int:
        """The hash of the pieces of `source` in staging. Raises WeightSyncError if a block is not the manifest's."""
        total = 0
        for each in _needed(source, manifest):
            name, block = each.block.name, each.block
            for part in each.parts:
                hashed = row_digest(self._staging.view(name, part), part, manifest.layout[name].shape, name)
                if part == block.box and manifest.digests and hashed != manifest.digests[name][block.number]:
                    raise WeightSyncError(
                        f"{self._who}: with the changes to version {manifest.version}, parameter {name}, {part} is "
                        f"not what learner rank {manifest.rank} has"
                    )
                total += hashed
        return total

    def _take_delta(self, source: SourcePlan, manifest: Manifest, key: str) -> int:
        sizes, hashes = self._table(manifest, key)
        needed = _needed(source, manifest, sizes)
        for each, record in self._read(key, needed):
            name, box = each.block.name, each.block.box
            if record_hash(record) != hashes[each.index]:
                raise WireError(f"the changes of {name}, {box} have another hash than they should")
            (changes,) = read(record, [(box.elements, ITEM_BYTES[manifest.layout[name].dtype])])
            for part in each.parts:
                add(self._staging.view(name, part), cut([(box, changes)], part))
        return manifest.header + sum(each.stop - each.start for each in needed)

    def _table(self, manifest: Manifest, key: str) -> tuple[list[int], list[int]]:
        """Bytes and hash of each record. Raises WireError for an impossible table."""
        most = [most_bytes(block.bytes) for block in blocks(manifest.layout)]
        if manifest.header != ENTRY_BYTES * len(most):
            raise WireError(f"a table of {manifest.header} bytes for {len(most)} blocks")
        table = torch.empty(manifest.header, dtype=torch.uint8)
        self._blobs.read(key, 0, table.numpy().data)
        sizes, hashes = table.view(torch.int64).view(-1, 2).t().tolist() or ([], [])
        fit = all(0 <= size <= limit and size % 8 == 0 for size, limit in zip(sizes, most, strict=True))
        if not fit or manifest.header + sum(sizes) != manifest.size:
            raise WireError(
                f"records of {sum(sizes)} bytes in a blob of {manifest.size}, or one that is too long"
            )
        return sizes, hashes

    def _read(self, key: str, needed: Sequence[Needed]) -> Iterator[tuple[Needed, torch.Tensor]]:
        """Each with its bytes, which the next one may overwrite. Neighbours in the blob are read at once."""
        run: list[Needed] = []
        for each in needed:
            if run and (each.start != run[-1].stop or each.stop - run[0].start > len(self._buffer)):
                yield from self._read_run(key, run)
                run = []
            run.append(each)
        if run:
            yield from self._read_run(key, run)

    def _read_run(self, key: str, run: Sequence[Needed]) -> Iterator[tuple[Needed, torch.Tensor]]:
        first = run[0].start
        data = self._buffer[: run[-1].stop - first]
        self._blobs.read(key, first, data.numpy().data)
        for each in run:
            yield each, data[each.start - first : each.stop - first]

    def _checked(self, block: StoredBlock, values: torch.Tensor, manifest: Manifest, key: str) -> int | None:
        """The hash of a block, which is the manifest's; None without verify."""
        if manifest.digests is None or not self._verify:
            return None
        expected = manifest.digests[block.name][block.number]
        hashed = row_digest(values, block.box, manifest.layout[block.name].shape, block.name)
        if hashed != expected:
            raise WeightSyncError(
                f"{self._who}: {key} at {self._blobs.where} is damaged: parameter {block.name}, {block.box} hashes to "
                f"{hashed:016x}, in the manifest of version {manifest.version} to {expected:016x}"
            )
        return hashed


def _needed(source: SourcePlan, manifest: Manifest, sizes: Sequence[int] | None = None) -> list[Needed]:
    """The blocks that pieces of a plan lie in. sizes: what each block takes in the blob; None: its bytes."""
    wanted: dict[str, list[Box]] = defaultdict(list)
    for piece in source.pieces:
        wanted[piece.name].append(piece.box)
    needed = []
    start = manifest.header
    for index, block in enumerate(blocks(manifest.layout)):
        stop = start + (block.bytes if sizes is None else sizes[index])
        parts = [part for box in wanted[block.name] if (part := block.box.intersection(box)) is not None]
        if parts:
            needed.append(Needed(start, stop, index, block, parts))
        start = stop
    return needed
