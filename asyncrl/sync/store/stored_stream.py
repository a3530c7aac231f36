"""The generator's end of stored weights: reads the newest version that all learner ranks have stored into staging.

      newest ─▸ manifests of all ranks ─▸ plan ─▸ of each rank's blobs, the blocks that hold what is needed ─▸ staging
         ▲                    │ deleted meanwhile
         └────────────────────┘

A version that is stored as changes is read from the one in staging on, or from the last that was stored in full.
Waits for nobody but the store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from asyncrl.config.schema import SyncConfig
from asyncrl.errors import WeightSyncError, WireError
from asyncrl.sync.layout.layout import Layout
from asyncrl.sync.plan.plan import Plan, SourcePlan, plan
from asyncrl.sync.store.blobs import Blobs, MissingBlobError, checked
from asyncrl.sync.store.stored import Manifest, from_bytes, manifest_key, tensors_key, version_of
from asyncrl.sync.store.stored_delta import KIND, DeltaReader, delta_key
from asyncrl.sync.store.stored_reader import StoredReader
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.sync.stream.subscriber import StagedWeights
from asyncrl.sync.tensors.bucket import BoxTensors, Shards
from asyncrl.sync.tensors.checksum import ROWS, Checksum, ChecksumShare
from asyncrl.sync.tensors.row_hash import MOD
from asyncrl.types import Version

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Between two looks for a newer version."""


class StoredStream:
    """Fills `staging`, tensors as `layout` says, from what the publishers with these endpoints store, all ranks in any
    order.

    Blocking; one thread at a time. Raises WeightSyncError when staging and layout do not match.
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
            log.warning("%s: what is staged is no longer what was read; all is read again", self.who)
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
        """Nobody counts who reads what is stored."""

    def close(self) -> None:
        self._blobs.close()

    def _good(self) -> bool:
        """Whether staging still holds what was staged last: a delta adds to that."""
        assert self._staged is not None
        return self._staged.checksum is None or self._staged.checksum.holds(self._staging)

    def _paths(self, version: Version, base: Version | None) -> list[list[Manifest]]:
        """Of each rank, the manifests to take one after another: from `base` on, or from a full version."""
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
        """Into staging; returns the hash of it and the bytes that were read."""
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
            manifest = from_bytes(self._blobs.get(key))
        except MissingBlobError as error:
            raise SnapshotEvictedError(f"{self.who}: version {version} was deleted: {error}") from error
        except WireError as error:
            raise WeightSyncError(f"{self.who}: {key} at {self._blobs.where}: {error}") from error
        says = (manifest.version, manifest.rank, manifest.world)
        lineage = manifest.lineage if self.lineage is None else self.lineage
        if says != (version, rank, len(self._series)) or manifest.lineage != lineage:
            raise WeightSyncError(
                f"{self.who}: {key} at {self._blobs.where} is foreign: of version {says[0]}, rank {says[1]} of "
                f"{says[2]}, lineage {manifest.lineage}; wanted version {version}, rank {rank} of "
                f"{len(self._series)}, lineage {lineage}"
            )
        if manifest.kind not in ("full", KIND):
            raise WeightSyncError(
                f"{self.who}: {key} is of kind {manifest.kind!r}, which this version cannot read"
            )
        return manifest
