"""Reading what a plan takes from one rank's blob, by ranges of bytes.

    box of the rank   [ block | block | block | block ]
    needed                 └──────────┘                     read: blocks 0, 1 and 2, in one range

Of a box that is cut along rows only those rows are read, to the next block; of one that is cut along columns all rows.
Each block is hashed before any of it goes to staging. A buffer of one bucket is all the memory this takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.sync.layout.layout import ITEM_BYTES, Box
from asyncrl.sync.plan.plan import SourcePlan
from asyncrl.sync.store.blobs import Blobs
from asyncrl.sync.store.stored import BLOCK_BYTES, Block, Manifest, blocks, offsets_in, tensor_names
from asyncrl.sync.tensors.bucket import Shards
from asyncrl.sync.tensors.row_hash import digest


class StoredReader:
    """Fills `staging` for `who`. verify: compare the hash of each block with the manifest's."""

    def __init__(self, who: str, blobs: Blobs, staging: Shards, bucket_bytes: int, *, verify: bool) -> None:
        self._who, self._blobs, self._staging, self._verify = who, blobs, staging, verify
        self._buffer = torch.empty(max(bucket_bytes, BLOCK_BYTES), dtype=torch.uint8)

    def take(self, source: SourcePlan, manifest: Manifest, key: str) -> int:
        """What `source` says, from the blob `key`, into staging; returns its hash (0 without verify).

        Raises MissingBlobError, WeightSyncError for a blob that is torn, damaged or of other tensors.
        """
        header = bytearray(manifest.header)
        self._blobs.read(key, 0, memoryview(header))
        offsets = offsets_in(bytes(header), manifest.layout, key)
        needed: dict[str, list[Box]] = defaultdict(list)
        for piece in source.pieces:
            needed[piece.name].append(piece.box)
        total = 0
        for name, boxes in needed.items():
            param, first = manifest.layout[name], 0
            for tensor, held in zip(tensor_names(name, len(param.boxes)), param.boxes, strict=True):
                here = list(blocks(held, ITEM_BYTES[param.dtype], first))
                first += len(here)
                wanted = [block for block in here if any(block.box.intersection(box) for box in boxes)]
                for run in _runs(wanted, len(self._buffer)):
                    total += self._take_run(name, boxes, run, offsets[tensor], manifest, key)
        return total

    def _take_run(
        self, name: str, boxes: Sequence[Box], run: Sequence[Block], offset: int, manifest: Manifest, key: str
    ) -> int:
        param, start = manifest.layout[name], run[0].start
        data = self._buffer[: run[-1].stop - start]
        self._blobs.read(key, offset + start, data.numpy().data)
        total = 0
        for block in run:
            flat = data[block.start - start : block.stop - start]
            values = flat.view(getattr(torch, param.dtype)).view(block.box.shape)
            hashed = self._checked(name, block, values, manifest, key)
            for box in boxes:
                if (common := block.box.intersection(box)) is None:
                    continue
                part = values[common.within(block.box).slices()]
                self._staging.view(name, common).copy_(part)
                if hashed is not None:
                    total += hashed if common == block.box else digest(part, common, param.shape, name)
        return total

    def _checked(
        self, name: str, block: Block, values: torch.Tensor, manifest: Manifest, key: str
    ) -> int | None:
        """The hash of a block, which is as it should be; None if nobody wants to know."""
        if manifest.digests is None or not self._verify:
            return None
        expected = manifest.digests[name][block.number]
        hashed = digest(values, block.box, manifest.layout[name].shape, name)
        if hashed != expected:
            raise WeightSyncError(
                f"{self._who}: {key} at {self._blobs.where} is damaged: parameter {name}, {block.box} hashes to "
                f"{hashed:016x}, in the manifest of version {manifest.version} to {expected:016x}"
            )
        return hashed


def _runs(needed: Sequence[Block], most: int) -> Iterator[list[Block]]:
    """Blocks that lie one behind the other, at most `most` bytes together."""
    run: list[Block] = []
    for block in needed:
        if run and (block.start != run[-1].stop or block.stop - run[0].start > most):
            yield run
            run = []
        run.append(block)
    if run:
        yield run
