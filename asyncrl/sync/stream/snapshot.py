"""Copies of a learner rank's shards, so that generators read version v while the learner trains v + 1.

    live shards ──copy──▸ [ slot: version v+1 ]   newest: the one that generators request
                          [ slot: version v   ] ◂── pinned by a transfer that is still running

A new version overwrites the slot without readers. When both are being read, the learner does not wait: it cancels the
transfers of one slot and overwrites it at once. Buckets that those still send are torn. This does no harm: a cancelled
transfer never ends in an acknowledgement, and a generator flips to acknowledged versions only.

The learner cancels the transfers of the younger slot, so that the oldest transfer can finish and slow generators cannot
starve each other. If all transfers of the older slot have stalled, it cancels those instead. With one slot, half the
memory, every transfer that outlasts a version is cancelled. A generator that is slower than the learner's steps then
gets none, until the learner itself must wait for groups.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from asyncrl.device import accelerator
from asyncrl.device.streams import SideStream, StreamEvent
from asyncrl.errors import WeightSyncError
from asyncrl.sync.tensors.shards import LiveShards, Shards, TensorBuffer
from asyncrl.telemetry import tracing
from asyncrl.types import Version

STALLED_S = 5.0
"""A transfer of which no bucket has moved for this long may be cancelled by a younger one."""

REMEASURE = 50
"""Publishes between two measurements of the copy that is the floor of the learner's pause."""


class SnapshotEvictedError(WeightSyncError):
    """The memory was needed for a newer version: start over with that one."""


@dataclass(eq=False, slots=True)
class Pin:
    """One transfer's hold on a slot."""

    who: str
    version: Version
    slot: int
    moved_at: float
    held: bool = True


@dataclass(slots=True)
class _Slot:
    version: Version | None = None  # None: empty, or being overwritten
    pins: list[Pin] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PublishReport:
    """pause_s: how long the learner stood still · bytes copied · floor_s: one plain copy of as many bytes."""

    pause_s: float
    bytes: int
    floor_s: float


class Snapshots:
    """Which slot holds which version, and who reads it. Thread-safe bookkeeping, without the bytes."""

    def __init__(self, slots: int = 2, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._idle = threading.Condition()
        self._slots = tuple(_Slot() for _ in range(slots))
        self._published: Version = -1

    def begin(self, version: Version) -> int:
        """The slot to write `version` into; its readers, if any, are cancelled. Versions must rise."""
        with self._idle:
            if version <= self._published:
                raise WeightSyncError(f"version {version} published after version {self._published}")
            self._published = version
            index = self._to_overwrite()
            slot = self._slots[index]
            for pin in slot.pins:
                pin.held = False
            slot.pins.clear()
            slot.version = None
            self._idle.notify_all()
            return index

    def commit(self, index: int) -> None:
        """The slot of the last `begin` is written: it may be read."""
        with self._idle:
            self._slots[index].version = self._published

    @property
    def newest(self) -> Version | None:
        """The newest version that can be pinned now."""
        with self._idle:
            return max((s.version for s in self._slots if s.version is not None), default=None)

    def slot_of(self, version: Version) -> int | None:
        """Where a version lies now; unlike `pin` this holds nothing: it may be overwritten at any moment."""
        with self._idle:
            return next((i for i, slot in enumerate(self._slots) if slot.version == version), None)

    def pin(self, version: Version, who: str) -> Pin | None:
        """Hold a version for reading; None: it is gone. Raises LookupError while it is still to come."""
        with self._idle:
            for index, slot in enumerate(self._slots):
                if slot.version == version:
                    pin = Pin(who, version, index, self._clock())
                    slot.pins.append(pin)
                    return pin
            if self.newest is None or version > self.newest:
                raise LookupError(version)
            return None

    def moved(self, pin: Pin) -> None:
        """A bucket has moved. Raises SnapshotEvictedError when the pin is no longer good."""
        with self._idle:
            if not pin.held:
                raise SnapshotEvictedError(f"version {pin.version} was taken back from {pin.who}")
            pin.moved_at = self._clock()

    def release(self, pin: Pin) -> None:
        """Idempotent. A transfer that still uses this pin gets SnapshotEvictedError from its next `moved`."""
        with self._idle:
            pin.held = False
            if pin in self._slots[pin.slot].pins:
                self._slots[pin.slot].pins.remove(pin)
            self._idle.notify_all()

    def wait_idle(self, seconds: float) -> bool:
        """Wait until nothing is pinned, at most `seconds`. Returns whether that is so."""
        with self._idle:
            return self._idle.wait_for(lambda: not any(slot.pins for slot in self._slots), seconds)

    def _to_overwrite(self) -> int:
        slots = self._slots
        by_age = sorted(range(len(slots)), key=lambda i: -1 if (v := slots[i].version) is None else v)
        for index in by_age:
            if not slots[index].pins:
                return index
        older, younger = by_age[0], by_age[-1]
        alive_since = self._clock() - STALLED_S
        alive = any(pin.moved_at > alive_since for pin in slots[older].pins)
        return younger if alive else older


class SnapshotMemory(Snapshots):
    """The snapshots of one rank's `live` shards, with their bytes.

    on_host: they lie in pinned memory of the host, where the shards are on an accelerator
    """

    def __init__(self, live: LiveShards, slots: int, on_host: bool = False) -> None:
        super().__init__(slots)
        self.live = live
        pinned = on_host and accelerator.is_accelerator(live.device)
        device = accelerator.CPU if pinned else live.device
        self._buffers = [TensorBuffer(live.layout, device, pinned) for _ in range(slots)]
        # Twice each: the first time also gets the memory from the system.
        self._floor_s = min(self._floor_of(buffer) for buffer in self._buffers for _ in range(2))
        self._copying = SideStream(live.device)
        self._taken = 0

    @property
    def device(self) -> torch.device:
        """The live shards' device, from which channels send; the snapshots may lie on the host."""
        return self.live.device

    @property
    def bytes(self) -> int:
        """Bytes of one version."""
        return self._buffers[0].bytes

    @property
    def allocated(self) -> int:
        """Bytes of memory that all snapshots take."""
        return sum(len(buffer.memory) for buffer in self._buffers)

    def take(self, version: Version) -> PublishReport:
        """Copy the live shards. Versions must rise.

        The learner's pause is this copy: it follows all that training has queued, and is whole when this returns.
        """
        slot = self.begin(version)
        buffer = self._buffers[slot]
        self._taken += 1
        if self._taken % REMEASURE == 0:
            self._floor_s = min(self._floor_of(buffer) for _ in range(2))
        trained = StreamEvent(self.live.device)
        with (
            self._copying.entered(),
            tracing.span("weights", "snapshot", version=version, bytes=buffer.bytes),
        ):
            trained.order()
            pause_s = buffer.take(self.live)
        self.commit(slot)
        return PublishReport(pause_s, buffer.bytes, self._floor_s)

    def _floor_of(self, buffer: TensorBuffer) -> float:
        return buffer.floor(self.live.device)

    def shards(self, pin: Pin) -> Shards:
        """The pinned version."""
        return self._buffers[pin.slot].shards

    def shards_of(self, version: Version) -> Shards | None:
        """A version while it lies here; nothing holds it: it may be overwritten at any moment."""
        slot = self.slot_of(version)
        return None if slot is None else self._buffers[slot].shards
