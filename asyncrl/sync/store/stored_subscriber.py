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
from collections.abc import Sequence

from asyncrl.config.schema import SyncConfig
from asyncrl.device import accelerator
from asyncrl.device.streams import SideStream
from asyncrl.errors import WeightSyncError, WireError
from asyncrl.sync.layout.layout import Layout
from asyncrl.sync.plan.plan import Plan, SourcePlan, plan
from asyncrl.sync.store.blobs import Blobs, MissingBlobError, checked_key
from asyncrl.sync.store.stored import (
    DELTA,
    FULL,
    Manifest,
    delta_key,
    manifest_from_bytes,
    manifest_key,
    tensors_key,
    version_of,
)
from asyncrl.sync.store.stored_reader import StoredReader
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.sync.stream.subscriber import StagedWeights
from asyncrl.sync.tensors.checksum import MOD, ROWS, Checksum, ChecksumShare
from asyncrl.sync.tensors.shards import Shards
from asyncrl.types import Version

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Between two looks for a newer version."""


class StoredSubscriber:
    """Fills staging memory from the blobs of all learner ranks. Blocking; one thread at a time.

    endpoints: of the publishers, in any order · lineage: the publishers must have this one
    """

    def __init__(
        self,
        who: str,
        endpoints: Sequence[str],
        staging: Shards,
        config: SyncConfig,
        lineage: int,
        blobs: Blobs,
    ) -> None:
        self.who, self.lineage = who, lineage
        self._series = sorted(checked_key(endpoint) for endpoint in endpoints)  # by rank
        self._staging, self._config, self._blobs = staging, config, blobs
        self._sources: list[Layout] = []
        self._plan = Plan(())
        self._reader = StoredReader(who, blobs, staging, config.bucket_bytes, verify=config.verify)
        self._staged: StagedWeights | None = None  # what lies whole in staging
        self._stream = SideStream(staging.device)

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
        with self._stream.entered():  # decoding waits for nothing of this
            staged = self._stage(version)
            accelerator.wait_for_stream(self._staging.device)
        return staged

    def _stage(self, version: Version) -> StagedWeights:
        begun = time.monotonic()
        paths = self._paths(version, None if self._staged is None else self._staged.version)
        if any(path[0].kind == DELTA for path in paths) and not self._good():
            log.warning("%s: the staged version is no longer as it was read; all is read again", self.who)
            paths = self._paths(version, None)
        self._staged = None
        sources = [path[-1].layout for path in paths]
        if sources != self._sources:
            self._plan = plan(sources, self._staging.layout, self._config.bucket_bytes)
            self._sources = sources
        taken = [self._take(source, paths[source.rank]) for source in self._plan.sources]
        pieces = (piece for source in self._plan.sources for piece in source.pieces)
        checksum = Checksum.joined([share for share, _ in taken], pieces)
        received = sum(read for _, read in taken)
        self._staged = StagedWeights(version, checksum, time.monotonic() - begun, received)
        return self._staged

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
        while path[0].kind == DELTA and (before := path[0].base) != base:
            if before is None or before >= path[0].version:
                raise WeightSyncError(
                    f"{self.who}: version {path[0].version} is stored as changes to {before}"
                )
            path.insert(0, self._manifest(rank, before))
        return path

    def _take(self, source: SourcePlan, path: Sequence[Manifest]) -> tuple[ChecksumShare | None, int]:
        """Read into staging. Returns the hash, and the bytes that were read."""
        hashed = read = 0
        for manifest in path:
            series = self._series[source.rank]
            try:
                if manifest.kind == DELTA:
                    read += self._reader.take_delta(source, manifest, delta_key(series, manifest.version))
                else:
                    hashed = self._reader.take_full(source, manifest, tensors_key(series, manifest.version))
                    read += source.bytes
            except MissingBlobError as error:
                self._manifest(source.rank, manifest.version)  # SnapshotEvictedError if it is gone too
                raise WeightSyncError(f"{self.who}: {error}, though its manifest is there") from error
        if not self._config.verify or path[-1].digests is None:
            return None, read
        if path[-1].kind == DELTA:
            hashed = self._reader.check(source, path[-1])
        # Blocks and pieces are cut differently: only the hash by rows adds up over both.
        return ChecksumShare(ROWS, hashed % MOD), read

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
        if found != (version, rank, len(self._series)) or manifest.lineage != self.lineage:
            raise WeightSyncError(
                f"{self.who}: {key} at {self._blobs.where} is foreign: of version {found[0]}, rank {found[1]} of "
                f"{found[2]}, lineage {manifest.lineage}; wanted version {version}, rank {rank} of "
                f"{len(self._series)}, lineage {self.lineage}"
            )
        if manifest.kind not in (FULL, DELTA):
            raise WeightSyncError(
                f"{self.who}: {key} is of kind {manifest.kind!r}, which this version cannot read"
            )
        return manifest
