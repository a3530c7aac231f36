"""Versions stored as changes to the one stored before: their format, their reader, and when to store in full again.

    …/00000012.safetensors   kind "full"
    …/00000013.delta         kind "delta", base 12        int64 [blocks, 2]: bytes and xxh64 of each record
    …/00000014.delta         kind "delta", base 13        the records, one for each block (see `stored`, `delta`)

A reader goes back from the newest manifest to the version it has staged, or to a full one, and makes the steps from
there. The manifest of a delta has the hashes of its whole version: in staging they are compared at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import xxhash

from asyncrl.errors import WeightSyncError, WireError
from asyncrl.sync.delta.delta import add, most_bytes, read
from asyncrl.sync.delta.delta_boxes import cut
from asyncrl.sync.layout.layout import ITEM_BYTES, Box, Layout
from asyncrl.sync.plan.plan import SourcePlan
from asyncrl.sync.store.blobs import Blobs
from asyncrl.sync.store.stored import BLOCK_BYTES, Block, Manifest, blocks, runs
from asyncrl.sync.tensors.bucket import Shards, flat_bytes
from asyncrl.sync.tensors.row_hash import row_digest
from asyncrl.types import Version

KIND = "delta"

FULL_EVERY = 8
"""Versions. A generator that joins reads a full one and the deltas after it."""

ENTRY_BYTES = 16


def delta_key(series: str, version: Version) -> str:
    return f"{series}/{version:08d}.delta"


def delta_header(records: Sequence[torch.Tensor]) -> bytes:
    """The table before the records."""
    entries = [(len(record), _signed(_hash(record))) for record in records]
    return flat_bytes(torch.tensor(entries, dtype=torch.int64)).numpy().tobytes()


@dataclass
class Chain:
    """The versions that one rank has stored since its last full one. full_bytes: of a full version."""

    full_bytes: int
    newest: Version = -1
    fulls: list[Version] = field(default_factory=list)
    bytes: int = 0
    steps: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether the next version may be a delta: the chain is short, and less to read than a full version."""
        return bool(self.fulls) and self.steps < FULL_EVERY - 1 and self.bytes < self.full_bytes

    def add_full(self, version: Version) -> None:
        self.newest, self.bytes, self.steps = version, 0, 0
        self.fulls.append(version)

    def add_delta(self, version: Version, bytes_: int) -> None:
        self.newest, self.bytes, self.steps = version, self.bytes + bytes_, self.steps + 1

    def first_needed(self, oldest: Version) -> Version:
        """The first of the versions that a reader of `oldest` needs."""
        return max((full for full in self.fulls if full <= oldest), default=oldest)


class DeltaReader:
    """Makes steps in `staging` for `who`."""

    def __init__(self, who: str, blobs: Blobs, staging: Shards, bucket_bytes: int) -> None:
        self._who, self._blobs, self._staging = who, blobs, staging
        self._buffer = torch.empty(max(bucket_bytes, most_bytes(BLOCK_BYTES)), dtype=torch.uint8)

    def take(self, source: SourcePlan, manifest: Manifest, key: str) -> int:
        """Make the step of a manifest in staging, for the pieces of `source`.

        Returns:
            The bytes that were read.

        Raises:
            MissingBlobError
            WeightSyncError: the blob is torn, damaged or of other tensors
        """
        try:
            return self._take(source, manifest, key)
        except WireError as error:
            raise WeightSyncError(f"{self._who}: {key} at {self._blobs.where} is damaged: {error}") from error

    def check(self, source: SourcePlan, manifest: Manifest) -> int:
        """The hash of the pieces of `source` in staging. Raises WeightSyncError if a block is not the manifest's."""
        total = 0
        for _, name, block, parts in _needed(source, manifest.layout):
            shape = manifest.layout[name].shape
            for part in parts:
                hashed = row_digest(self._staging.view(name, part), part, shape, name)
                if part == block.box and manifest.digests and hashed != manifest.digests[name][block.number]:
                    raise WeightSyncError(
                        f"{self._who}: with the changes to version {manifest.version}, parameter {name}, {part} is "
                        f"not what learner rank {manifest.rank} has"
                    )
                total += hashed
        return total

    def _take(self, source: SourcePlan, manifest: Manifest, key: str) -> int:
        sizes, hashes = self._table(manifest, key)
        starts = list(accumulate(sizes, initial=manifest.header))
        total = manifest.header
        needed = list(_needed(source, manifest.layout))
        for run in runs(needed, lambda each: (starts[each[0]], starts[each[0] + 1]), len(self._buffer)):
            first, last = run[0][0], run[-1][0]
            data = self._buffer[: starts[last + 1] - starts[first]]
            self._blobs.read(key, starts[first], data.numpy().data)
            total += len(data)
            for index, name, block, parts in run:
                record = data[starts[index] - starts[first] :][: sizes[index]]
                if _signed(_hash(record)) != hashes[index]:
                    raise WireError(f"the changes of {name}, {block.box} have another hash than they should")
                self._make(record, name, block, parts, manifest.layout)
        return total

    def _make(self, record: torch.Tensor, name: str, block: Block, parts: list[Box], layout: Layout) -> None:
        (changes,) = read(record, [(block.box.elements, ITEM_BYTES[layout[name].dtype])])
        for part in parts:
            add(self._staging.view(name, part), cut([(block.box, changes)], part))

    def _table(self, manifest: Manifest, key: str) -> tuple[list[int], list[int]]:
        """Bytes and hash of each record. Raises WireError for an impossible table."""
        most = [most_bytes(block.stop - block.start) for _, block in all_blocks(manifest.layout)]
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


_Needed = tuple[int, str, Block, list[Box]]
"""Number of a block among all · its parameter · the block · the needed parts of it."""


def all_blocks(layout: Layout) -> Iterator[tuple[str, Block]]:
    """The blocks of a rank by parameter, numbered within each."""
    for name, param in layout.items():
        number = 0
        for box in param.boxes:
            for block in blocks(box, ITEM_BYTES[param.dtype], number):
                yield name, block
                number += 1


def _needed(source: SourcePlan, layout: Layout) -> Iterator[_Needed]:
    wanted: dict[str, list[Box]] = defaultdict(list)
    for piece in source.pieces:
        wanted[piece.name].append(piece.box)
    for index, (name, block) in enumerate(all_blocks(layout)):
        parts = [part for box in wanted.get(name, ()) if (part := block.box.intersection(box)) is not None]
        if parts:
            yield index, name, block, parts


def _hash(record: torch.Tensor) -> int:
    return xxhash.xxh64_intdigest(record.numpy().data)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
