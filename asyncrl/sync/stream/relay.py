"""A generator hands the version that it is staging on to others of its layout, bucket by bucket, from its own memory.

      learner ──▸ staging of A ──▸ staging of B ──▸ staging of C       A and B are relays
                   bucket 7          bucket 6         bucket 5

A child takes the buckets in the order in which the relay expects them, the first of each learner rank, then the
second of each, …, and waits for each. Its acknowledgement waits until this generator has its own, with the learner's
hash. A relay waits for no child: when the next version begins, or the transfer fails, the children's transfers end as
evicted.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from asyncrl.config.schema import SyncConfig
from asyncrl.device.streams import StreamEvent
from asyncrl.errors import DeadlineError, RefusedError
from asyncrl.rpc.keys import ClientKeys
from asyncrl.sync.delta.delta_stream import Deltas
from asyncrl.sync.delta.link_speed import LinkSpeed
from asyncrl.sync.plan.plan import Plan, SourcePlan, source_from_wire
from asyncrl.sync.stream.snapshot import Pin, SnapshotEvictedError
from asyncrl.sync.stream.version_server import VersionServer
from asyncrl.sync.tensors.checksum import ChecksumShare
from asyncrl.sync.tensors.shards import Shards
from asyncrl.types import Version


class StagingSource:
    """The version in a staging memory as a `VersionSource`: which buckets have come, and who reads them. Thread-safe.

    plan: the order in which buckets are expected
    """

    def __init__(self, who: str, staging: Shards, plan: SourcePlan) -> None:
        self.plan = plan
        self._who, self._staging = who, staging
        self._changed = threading.Condition()
        self._version: Version | None = None
        self._pins: list[Pin] = []
        self._arrived: dict[
            int, StreamEvent
        ] = {}  # by bucket: when it lies there, on the stream that unpacks it
        self._whole = False
        self._share: ChecksumShare | None = None

    def begin(self, version: Version) -> None:
        """From now on the memory is filled with this version; transfers of another one are cancelled.

        Beginning the version that is there already changes nothing: the same bytes come again.
        """
        with self._changed:
            if version != self._version:
                self._cancel()
                self._version = version

    def arrived(self, bucket: int) -> None:
        """In the thread that receives it."""
        with self._changed:
            self._arrived[bucket] = StreamEvent(self.device)
            self._changed.notify_all()

    def complete(self, share: ChecksumShare | None) -> None:
        """All has arrived, and the learner's acknowledgement with it."""
        with self._changed:
            self._whole, self._share = True, share
            self._changed.notify_all()

    def withdraw(self) -> None:
        """The transfer failed: the memory holds no version."""
        with self._changed:
            self._cancel()

    def _cancel(self) -> None:
        for pin in self._pins:
            pin.held = False
        self._pins.clear()
        self._arrived.clear()
        self._version, self._whole, self._share = None, False, None
        self._changed.notify_all()

    def pin(self, version: Version, who: str) -> Pin | None:
        """As `Snapshots.pin`; a version that is still arriving may be pinned."""
        with self._changed:
            if self._version is None or version > self._version:
                raise LookupError(version)
            if version < self._version:
                return None
            pin = Pin(who, version, 0, time.monotonic())
            self._pins.append(pin)
            return pin

    def moved(self, pin: Pin) -> None:
        if not pin.held:
            raise SnapshotEvictedError(f"version {pin.version} was taken back from {pin.who} by {self._who}")

    def release(self, pin: Pin) -> None:
        with self._changed:
            pin.held = False
            if pin in self._pins:
                self._pins.remove(pin)
            self._changed.notify_all()

    @property
    def device(self) -> torch.device:
        return self._staging.device

    def requested_plan(self, wire: Any) -> SourcePlan:
        if source_from_wire(wire, 0, self._staging.layout) != self.plan:
            raise RefusedError("plan", f"{self._who} hands on another plan than this")
        return self.plan

    def shards(self, pin: Pin) -> Shards:
        return self._staging

    def ready(self, pin: Pin, bucket: int, seconds: float) -> None:
        self._wait_for(pin, bucket, seconds)
        if (event := self._arrived.get(bucket)) is not None:
            event.order()

    def share(self, pin: Pin, source: SourcePlan, seconds: float) -> ChecksumShare | None:
        """The learner's, once the version is whole."""
        return self._wait_for(pin, None, seconds)

    def deltas(
        self, pin: Pin, base: Version | None, source: SourcePlan, speed: LinkSpeed, seconds: float
    ) -> Deltas | None:
        """A relay keeps none: its children are near."""
        return None

    def _wait_for(self, pin: Pin, bucket: int | None, seconds: float) -> ChecksumShare | None:
        """Wait until that bucket is here, or the whole version (None). Returns the learner's hash of a whole one."""
        with self._changed:

            def here() -> bool:
                return self._whole or bucket in self._arrived or not pin.held

            if not self._changed.wait_for(here, max(0.0, seconds)):
                what = "all of it" if bucket is None else f"bucket {bucket}"
                raise DeadlineError(pin.who, self._who, f"version {pin.version}, {what}", seconds)
            self.moved(pin)
            return self._share


class Relay:
    """Serves `staging`, which its owner fills by `plan`, to the members whose route leads here."""

    def __init__(
        self,
        who: str,
        staging: Shards,
        plan: Plan,
        config: SyncConfig,
        lineage: int,
        host: str,
        keys: ClientKeys | None,
    ) -> None:
        self.who = who
        buckets = {
            (index, source.rank): bucket
            for source in plan.sources
            for index, bucket in enumerate(source.buckets)
        }
        order = sorted(buckets)
        self.source = StagingSource(who, staging, SourcePlan(0, tuple(buckets[key] for key in order)))
        self._indices = {key: number for number, key in enumerate(order)}
        self.server = VersionServer(
            f"{who}, a relay,", self.source, config, lineage=lineage, host=host, keys=keys, handlers={}
        )
        self.endpoint = self.server.endpoint

    def begin(self, version: Version) -> None:
        self.source.begin(version)
        self.server.server.wake()

    def arrived(self, rank: int | None, bucket: int) -> None:
        """A bucket lies in the staging memory. rank: of the learner that sent it; None: another relay did."""
        self.source.arrived(bucket if rank is None else self._indices[bucket, rank])

    def close(self) -> None:
        self.source.withdraw()
        self.server.close()
