"""The generator's end of stored weights: reads the newest version that all learner ranks have stored into staging.

      newest ─▸ manifests of all ranks ─▸ plan ─▸ of each rank's blobs, the blocks that hold what is needed ─▸ staging
         ▲                    │ deleted meanwhile
         └────────────────────┘

A version that is stored as changes is read from the one in staging on, or from the last that was stored in full. It
waits for the store alone.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from asyncrl.config.schema import SyncConfig
from asyncrl.errors import WeightSyncError, WireError
from asyncrl.sync.layout.layout import ITEM_BYTES, Box, Layout
from asyncrl.sync.plan.plan import Plan, SourcePlan, plan
from asyncrl.sync.store.blobs import Blobs, MissingBlobError, checked
from asyncrl.sync.store.stored import (
    BLOCK_BYTES,
    Block,
    Manifest,
    blocks,
    manifest_from_bytes,
    manifest_key,
    offsets_in,
    runs,
    tensor_names,
    tensors_key,
    version_of,
)
from asyncrl.sync.store.stored_delta import KIND, DeltaReader, delta_key
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.sync.stream.subscriber import StagedWeights
from asyncrl.sync.tensors.bucket import BoxTensors, Shards
from asyncrl.sync.tensors.checksum import ROWS, Checksum, ChecksumShare
from asyncrl.sync.tensors.row_hash import MOD, row_digest
from asyncrl.types import Version

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Between two looks for a newer version."""


class StoredReader:
    """Fills `staging` for `who`. verify: compare the hash of each block with the manifest's.

        box of the rank   [ block | block | block | block ]
        needed                 └──────────┘                     read: blocks 0, 1 and 2, in one range

    It reads all rows of a box that is cut along columns; of one that is cut along rows the needed ones, to the next
    block. Each block is hashed before any of it goes to staging. A buffer of one bucket is all the memory this takes.
    """

    def __init__(self, who: str, blobs: Blobs, staging: Shards, bucket_bytes: int, *, verify: bool) -> None:
        self._who, self._blobs, self._staging, self._verify = who, blobs, staging, verify
        self._buffer = torch.empty(max(bucket_bytes, BLOCK_BYTES), dtype=torch.uint8)

    def take(self, source: SourcePlan, manifest: Manifest, key: str) -> int:
        """Read the pieces of `source` from the blob `key` into staging.

        Returns:
            Their hash; 0 without verify.

        Raises:
            MissingBlobError
            WeightSyncError: the blob is torn, damaged or of other tensors
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
                for run in runs(wanted, lambda block: (block.start, block.stop), len(self._buffer)):
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
                    total += hashed if common == block.box else row_digest(part, common, param.shape, name)
        return total

    def _checked(
        self, name: str, block: Block, values: torch.Tensor, manifest: Manifest, key: str
    ) -> int | None:
        """The hash of a block, which is the manifest's; None without verify."""
        if manifest.digests is None or not self._verify:
            return None
        expected = manifest.digests[name][block.number]
        hashed = row_digest(values, block.box, manifest.layout[name].shape, name)
        if hashed != expected:
            raise WeightSyncError(
                f"{self._who}: {key} at {self._blobs.where} is damaged: parameter {name}, {block.box} hashes to "
                f"{hashed:016x}, in the manifest of version {manifest.version} to {expected:016x}"
            )
        return hashed


class StoredStream:
    """Fills staging memory from the blobs of all learner ranks. Blocking; one thread at a time.

    Args:
        endpoints: of the publishers, in any order
        layout: of this generator rank
        staging: its tensors
        lineage: the publishers must have this one; None: any

    Raises:
        WeightSyncError: staging and layout do not match
    """

    def __init__(
        self,
        who: str,
        endpoints: Sequence[str],
        layout: Layout,
        config: SyncConfig,
        staging: Mapping[str, BoxTensors],
        blobs: Blobs,
        lineage: int | None = None,
    ) -> None:
        self.who, self.lineage = who, lineage
        self._series = sorted(checked(endpoint) for endpoint in endpoints)  # by rank
        self._layout, self._config, self._blobs = layout, config, blobs
        self._sources: list[Layout] = []
        self._plan = Plan(())
        self._bucket_bytes = config.bucket_bytes
        self._staging = Shards(layout, staging)
        self._reader = StoredReader(who, blobs, self._staging, self._bucket_bytes, verify=config.verify)
        self._deltas = DeltaReader(who, blobs, self._staging, self._bucket_bytes)
        self._staged: StagedWeights | None = None  # what lies whole in staging

    def newest(self, newer_than: Version, wait_s: float) -> Version | None:
        """The newest version above `newer_than` that every rank has stored; None when none came in `wait_s`."""
        deadline = time.monotonic() + wait_s
        while True:
            found = self._versions(self._series[0], newer_than)
            for series in self._series[1:]:
                found = found and found & self._versions(series, newer_than)
            if found:
                return max(found)
            if time.monotonic() >= deadline:
                return None
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))

    def stage(self, version: Version) -> StagedWeights:
        """Stage exactly this version.

        Raises:
            SnapshotEvictedError: it was deleted meanwhile
            WeightSyncError: a blob is torn, damaged, or of another learner
        """
        begun = time.monotonic()
        paths = self._paths(version, None if self._staged is None else self._staged.version)
        if any(path[0].kind == KIND for path in paths) and not self._good():
            log.warning("%s: the staged version is no longer as it was read; all is read again", self.who)
            paths = self._paths(version, None)
        self._staged = None
        sources = [path[-1].layout for path in paths]
        if sources != self._sources:
            self._plan, self._sources = plan(sources, self._layout, self._bucket_bytes), sources
        taken = [self._take(source, paths[source.rank]) for source in self._plan.sources]
        verified = self._config.verify and all(path[-1].digests is not None for path in paths)
        checksum = None
        if verified:
            # Blocks and pieces are cut differently: only the hash by rows adds up over both.
            total = sum(hashed for hashed, _ in taken) % MOD
            checksum = Checksum(
                ChecksumShare(ROWS, total), tuple(p for s in self._plan.sources for p in s.pieces)
            )
        self._staged = StagedWeights(
            version, checksum, time.monotonic() - begun, sum(read for _, read in taken)
        )
        return self._staged

    def fetch(self, newer_than: Version, wait_s: float) -> StagedWeights | None:
        """Stage the newest version above `newer_than`; None when none came, or none stayed, in `wait_s`."""
        deadline = time.monotonic() + wait_s
        while (version := self.newest(newer_than, max(0.0, deadline - time.monotonic()))) is not None:
            try:
                return self.stage(version)
            except SnapshotEvictedError:
                if time.monotonic() >= deadline:
                    return None
        return None

    def held(self, version: Version) -> None:
        """Nothing: readers of stored versions are not counted."""

    def close(self) -> None:
        self._blobs.close()

    def _good(self) -> bool:
        """Whether staging still holds what was staged last: a delta adds to that."""
        assert self._staged is not None
        return self._staged.checksum is None or self._staged.checksum.holds(self._staging)

    def _paths(self, version: Version, base: Version | None) -> list[list[Manifest]]:
        """For each rank the manifests to take one after another: from `base` on, or from a full version."""
        return [self._path(rank, version, base) for rank in range(len(self._series))]

    def _path(self, rank: int, version: Version, base: Version | None) -> list[Manifest]:
        path = [self._manifest(rank, version)]
        while path[0].kind == KIND and (before := path[0].base) != base:
            if before is None or before >= path[0].version:
                raise WeightSyncError(
                    f"{self.who}: version {path[0].version} is stored as changes to {before}"
                )
            path.insert(0, self._manifest(rank, before))
        return path

    def _take(self, source: SourcePlan, path: Sequence[Manifest]) -> tuple[int, int]:
        """Read into staging. Returns the hash, and the bytes that were read."""
        hashed = read = 0
        for manifest in path:
            series = self._series[source.rank]
            try:
                if manifest.kind == KIND:
                    read += self._deltas.take(source, manifest, delta_key(series, manifest.version))
                else:
                    hashed = self._reader.take(source, manifest, tensors_key(series, manifest.version))
                    read += source.bytes
            except MissingBlobError as error:
                self._manifest(source.rank, manifest.version)  # SnapshotEvictedError if it is gone too
                raise WeightSyncError(f"{self.who}: {error}, though its manifest is there") from error
        if path[-1].kind == KIND and self._config.verify:
            hashed = self._deltas.check(source, path[-1])
        return hashed, read

    def _versions(self, series: str, newer_than: Version) -> set[Version]:
        found = {version_of(key) for key in self._blobs.list(series)}
        return {version for version in found if version is not None and version > newer_than}

    def _manifest(self, rank: int, version: Version) -> Manifest:
        key = manifest_key(self._series[rank], version)
        try:
            manifest = manifest_from_bytes(self._blobs.get(key))
        except MissingBlobError as error:
            raise SnapshotEvictedError(f"{self.who}: version {version} was deleted: {error}") from error
        except WireError as error:
            raise WeightSyncError(f"{self.who}: {key} at {self._blobs.where}: {error}") from error
        found = (manifest.version, manifest.rank, manifest.world)
        lineage = manifest.lineage if self.lineage is None else self.lineage
        if found != (version, rank, len(self._series)) or manifest.lineage != lineage:
            raise WeightSyncError(
                f"{self.who}: {key} at {self._blobs.where} is foreign: of version {found[0]}, rank {found[1]} of "
                f"{found[2]}, lineage {manifest.lineage}; wanted version {version}, rank {rank} of "
                f"{len(self._series)}, lineage {lineage}"
            )
        if manifest.kind not in ("full", KIND):
            raise WeightSyncError(
                f"{self.who}: {key} is of kind {manifest.kind!r}, which this version cannot read"
            )
        return manifest
