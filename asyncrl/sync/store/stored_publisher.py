"""The learner's end of stored weights: each rank writes its shards of a version where generators find them.

      trainer ── publish(v) ──▸ snapshot (the only pause)
                                     │ newest, pinned
      writer thread ◂────────────────┘ tensors, or changes ▸ manifest ▸ delete old versions

The trainer waits for no write. A writer that is slower than the learner's steps goes on with the newest version when it
is done with one; those between are never stored. No rank waits for another: readers take a version that all have
written.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from asyncrl.config.schema import SyncConfig
from asyncrl.device.streams import SideStream
from asyncrl.errors import AsyncRLError, WeightSyncError
from asyncrl.sync.delta.device_delta import all_changes
from asyncrl.sync.delta.link_speed import LinkSpeed
from asyncrl.sync.delta.records import changes_to_bytes, deflate
from asyncrl.sync.layout.layout import ITEM_BYTES, layout_bytes
from asyncrl.sync.store.blobs import Blobs, Bytes
from asyncrl.sync.store.stored import (
    DELTA,
    FULL,
    Manifest,
    StoredBlock,
    blocks,
    delta_key,
    delta_table,
    header_of,
    manifest_key,
    manifest_to_bytes,
    tensors_key,
    version_of,
)
from asyncrl.sync.stream.publisher import RankPublisher
from asyncrl.sync.stream.snapshot import Pin, PublishReport, SnapshotEvictedError, SnapshotMemory
from asyncrl.sync.tensors.checksum import row_digest
from asyncrl.sync.tensors.shards import LiveShards, flat_bytes
from asyncrl.telemetry import tracing
from asyncrl.types import Version

FULL_EVERY = 8
"""Versions. A generator that joins reads a full one and the deltas after it."""

RETRY_S = 1.0
"""Pause after a failed write."""

FAILURES = 5
"""Failed writes in a row after which `publish` raises."""

CLOSE_S = 1.0
"""How long `close` waits for a write to end."""

log = logging.getLogger(__name__)


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


class StoredPublisher(RankPublisher):
    """Stores this rank's live shards.

    Its attributes are many because the trainer and the writer's thread share them: the newest version and its failures.
    """

    def __init__(
        self, rank: int, world: int, live: LiveShards, config: SyncConfig, lineage: int, blobs: Blobs
    ) -> None:
        super().__init__(
            rank, world, lineage, config, SnapshotMemory(live, 2, config.snapshot_device == "host")
        )
        self.endpoint = f"rank-{rank:05d}/{lineage}-{secrets.token_hex(8)}"
        self._layout, self._blobs = live.layout, blobs
        self._chain = Chain(self._snapshots.bytes)  # the writer's
        self._speed = LinkSpeed()  # of the store
        self._changed = threading.Condition()  # guards what follows
        self._stored: Version = -1
        self._failed = 0
        self._why = ""
        self._closing = False
        self._counts = Counter({"stored": 0, "bytes": 0, "delta_bytes": 0, "failures": 0})
        self._thread = threading.Thread(target=self._run, name=f"storing weights of {self.name}", daemon=True)
        self._thread.start()
        # A thread that is inside torch while the interpreter is taken down aborts the process.
        atexit.register(self.close)

    def publish(self, version: Version) -> PublishReport:
        """As the base; raises WeightSyncError when the last versions could not be stored."""
        if self._failed >= FAILURES:
            raise WeightSyncError(
                f"{self.name}: {self._failed} times in a row weights could not be stored at {self._blobs.where}: "
                f"{self._why}"
            )
        report = self._snapshots.take(version)
        with self._changed:
            self._changed.notify_all()
        return report

    def stats(self) -> dict[str, float]:
        """Since the start: versions stored, bytes, those of deltas among them, failures."""
        with self._changed:
            return dict(self._counts)

    def close(self, wait_s: float = 0.0) -> None:
        """Let the newest version be stored, at most `wait_s`, then end. May be called again."""
        atexit.unregister(self.close)
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting(), wait_s)
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        self._blobs.close()

    # The writer thread.

    def _waiting(self) -> bool:
        newest = self._snapshots.newest
        return newest is not None and newest > self._stored

    def _run(self) -> None:
        with SideStream(self._snapshots.device).entered():
            self._store_all()

    def _store_all(self) -> None:
        swept = False
        while not self._closing:
            try:
                if not swept:
                    # Those of earlier publishers of this rank.
                    self._blobs.sweep(self.endpoint.partition("/")[0], self.endpoint)
                    swept = True
                self._store_newest()
            except SnapshotEvictedError:
                continue
            except (OSError, AsyncRLError) as error:
                self._fails(error)

    def _store_newest(self) -> None:
        """Wait for a version that is not stored, and store it. Returns at once when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting())
            version = self._snapshots.newest
            pin = None if self._closing or version is None else self._snapshots.pin(version, "the writer")
        if pin is None:
            return
        try:
            with tracing.span("weights", "store", version=version) as at_end:
                at_end["bytes"] = self._store(pin)
        finally:
            self._snapshots.release(pin)
        with self._changed:
            self._stored, self._failed = pin.version, 0
            self._counts["stored"] += 1
            self._changed.notify_all()

    def _store(self, pin: Pin) -> int:
        """Store the version or its changes, then the manifest; then delete older ones. Returns the bytes written."""
        written = self._store_changes(pin)
        if written is None:
            begun = time.monotonic()
            written = self._store_full(pin)
            self._chain.add_full(pin.version)
            self._speed = LinkSpeed.of(written, time.monotonic() - begun)
        else:
            self._chain.add_delta(pin.version, written)
            self._count("delta_bytes", written)
        self._count("bytes", written)
        self._prune()
        return written

    def _store_full(self, pin: Pin) -> int:
        """Returns the bytes of the blob."""
        digests = self._no_digests()
        header = header_of(self._layout, {"version": str(pin.version), "rank": str(self.rank)})
        self._blobs.put(tensors_key(self.endpoint, pin.version), self._parts(pin, header, digests))
        size = len(header) + layout_bytes(self._layout)
        self._put_manifest(pin, FULL, None, size, len(header), digests)
        return size

    def _store_changes(self, pin: Pin) -> int | None:
        """Returns the bytes of the blob; None: it must be stored in full."""
        if (
            self._config.delta == "never"
            or not (self._speed.is_slow or self._config.delta == "always")
            or not self._chain.goes_on
        ):
            return None
        base = self._chain.newest
        digests = self._no_digests()
        records = []
        for block in blocks(self._layout):
            new = self._block(pin, block, digests)
            old = self._snapshots.shards_of(base)
            if old is not None:
                records.append(changes_to_bytes(*all_changes([(old.view(block.name, block.box), new)])))
            if old is None or self._snapshots.shards_of(base) is not old:
                return None  # the base was overwritten meanwhile: nothing pins it
        if self._speed.is_very_slow:  # only now: the base may be overwritten while blocks are compared
            for index, block in enumerate(blocks(self._layout)):
                self._require_open(pin)
                item = ITEM_BYTES[self._layout[block.name].dtype]
                records[index] = deflate(records[index], item)
        table = delta_table(records)
        size = len(table) + sum(map(len, records))
        if size >= self._snapshots.bytes:
            return None
        parts: list[Bytes] = [table, *(record.numpy().data for record in records)]
        self._blobs.put(delta_key(self.endpoint, pin.version), parts)
        self._put_manifest(pin, DELTA, base, size, len(table), digests)
        return size

    def _no_digests(self) -> dict[str, list[int]]:
        return {name: [] for name in self._layout}

    def _parts(self, pin: Pin, header: bytes, digests: dict[str, list[int]]) -> Iterator[Bytes]:
        """The blob, block by block; fills `digests` on the way."""
        yield header
        for block in blocks(self._layout):
            yield flat_bytes(self._block(pin, block, digests).contiguous()).cpu().numpy().data

    def _block(self, pin: Pin, block: StoredBlock, digests: dict[str, list[int]]) -> torch.Tensor:
        """The block of a pinned version; adds its hash. Raises SnapshotEvictedError once the pin is no good."""
        self._require_open(pin)
        self._snapshots.moved(pin)
        values = self._snapshots.shards(pin).view(block.name, block.box)
        if self._config.verify:
            shape = self._layout[block.name].shape
            digests[block.name].append(row_digest(values, block.box, shape, block.name))
        return values

    def _require_open(self, pin: Pin) -> None:
        if self._closing:
            raise SnapshotEvictedError(f"{self.name}: closed while it stored version {pin.version}")

    def _put_manifest(
        self,
        pin: Pin,
        kind: str,
        base: Version | None,
        size: int,
        header: int,
        digests: dict[str, list[int]],
    ) -> None:
        manifest = Manifest(
            self.lineage,
            pin.version,
            self.rank,
            self.world,
            kind=kind,
            base=base,
            size=size,
            header=header,
            layout=self._layout,
            digests=digests if self._config.verify else None,
        )
        self._blobs.put(manifest_key(self.endpoint, pin.version), [manifest_to_bytes(manifest)])

    def _count(self, event: str, amount: int) -> None:
        with self._changed:
            self._counts[event] += amount

    def _prune(self) -> None:
        """Keep sync.keep versions and those that they are changes of.

        Manifests go first: a reader that finds one finds its tensors, or no manifest on its second look.
        """
        versions = sorted(v for key in self._blobs.list(self.endpoint) if (v := version_of(key)) is not None)
        needed = self._chain.first_needed(versions[-self._config.keep :][0])
        for version in (v for v in versions if v < needed):
            for key_of in (manifest_key, tensors_key, delta_key):
                self._blobs.delete(key_of(self.endpoint, version))

    def _fails(self, error: Exception) -> None:
        with self._changed:
            self._failed += 1
            self._counts["failures"] += 1
            self._why = str(error)
            self._changed.notify_all()
        log.warning("%s: weights could not be stored at %s: %s", self.name, self._blobs.where, error)
        with self._changed:
            self._changed.wait_for(lambda: self._closing, RETRY_S)
