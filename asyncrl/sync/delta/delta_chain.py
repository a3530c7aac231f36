"""The steps v-1 -> v of one learner rank's shards, made once for all generators and kept for those that lag.

      publish(v) ─▸ thread: shards of v-1 against v, tile by tile ─▸ Step
                      └ v-1 was overwritten meanwhile: no step, and v is taken in full          │
      sender: base -> v? ◂── the steps between them, each as messages of the sender's plan ◂────┘
                             (made once per plan: replicas share them)

The learner waits for nothing here: the snapshot of v-1 is read without a hold on it, and the step is discarded if the
snapshot was not whole to the end. Steps are made only after the first request for one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from asyncrl.device import accelerator
from asyncrl.device.streams import SideStream
from asyncrl.sync.delta.delta import Changes, cut, in_order
from asyncrl.sync.delta.delta_stream import MOST_STEPS, Deltas
from asyncrl.sync.delta.device_delta import all_changes
from asyncrl.sync.delta.records import changes_nothing, changes_to_bytes, deflate, join, read
from asyncrl.sync.layout.layout import ITEM_BYTES, Box, Layout
from asyncrl.sync.plan.plan import Piece, SourcePlan, tiles
from asyncrl.sync.tensors.shards import Shards
from asyncrl.types import Version

log = logging.getLogger(__name__)

TILE_BYTES = 1 << 20
"""Compared at once on a CPU: intermediate results stay in the cache."""

DEVICE_TILE_BYTES, DEVICE_TILES = 1 << 24, 16
"""Bytes of a tile on an accelerator, and the tiles whose changes are copied from there together."""

Messages = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a held box, and the record of its changes."""

    box: Box
    record: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeltaStep:
    """From `base`, the version published before it, to `version`.

    tiles: of each parameter, all that is held · routed: messages by plan, and by whether they are deflated
    """

    base: Version
    version: Version
    tiles: Mapping[str, Sequence[Tile]]
    routed: dict[tuple[SourcePlan, bool], Messages] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        records = (tile.record for of_param in self.tiles.values() for tile in of_param)
        messages = (message for routed in self.routed.values() for message in routed)
        return sum(part.numel() for parts in (records, messages) for part in parts)


def make_step(
    base: Version, version: Version, old: Shards, new: Shards, still_good: Callable[[], bool]
) -> DeltaStep | None:
    """The step; None as soon as `still_good()` is false, which is called after each reading of tiles."""
    found: dict[str, list[Tile]] = {name: [] for name in new.layout}
    fast = accelerator.is_accelerator(new.device)
    coming = tiles(new.layout, DEVICE_TILE_BYTES if fast else TILE_BYTES)
    while some := list(islice(coming, DEVICE_TILES if fast else 1)):
        changes = all_changes([(old.view(name, box), new.view(name, box)) for name, box in some])
        if not still_good():
            return None
        for (name, box), of_tile in zip(some, changes, strict=True):
            found[name].append(Tile(box, changes_to_bytes(of_tile)))
    return DeltaStep(base, version, found)


def route(
    step: DeltaStep, source: SourcePlan, layout: Layout, *, deflated: bool, in_time: Callable[[], bool]
) -> Messages | None:
    """One message for each bucket of a plan: a record for each piece, or nothing where none has changes.

    Returns None as soon as `in_time()`, which is called before each bucket, is false.
    """
    messages = []
    for bucket in source.buckets:
        if not in_time():
            return None
        items = [ITEM_BYTES[layout[piece.name].dtype] for piece in bucket.pieces]
        records = [
            _record(step.tiles[piece.name], piece, item)
            for piece, item in zip(bucket.pieces, items, strict=True)
        ]
        if all(map(changes_nothing, records)):
            records = [torch.empty(0, dtype=torch.uint8)]
        elif deflated:
            records = [deflate(record, item) for record, item in zip(records, items, strict=True)]
        messages.append(torch.cat(records))
    return tuple(messages)


def _record(tiles: Sequence[Tile], piece: Piece, item: int) -> torch.Tensor:
    """The record of a piece: those of its tiles, joined as they are where they lie one after another in it."""
    inside = [(tile, both) for tile in tiles if (both := tile.box.intersection(piece.box)) is not None]
    if len(inside) == 1 and inside[0][0].box == piece.box:
        return inside[0][0].record
    if in_order([both for _, both in inside], piece.box):
        joined = join([(_part(tile, both, item), both.elements) for tile, both in inside], item)
        if joined is not None:
            return joined
    return changes_to_bytes(cut([(tile.box, _read(tile, item)) for tile, _ in inside], piece.box))


def _part(tile: Tile, box: Box, item: int) -> torch.Tensor:
    """The record of a box inside of a tile."""
    return tile.record if tile.box == box else changes_to_bytes(cut([(tile.box, _read(tile, item))], box))


def _read(tile: Tile, item: int) -> Changes:
    (changes,) = read(tile.record, [(tile.box.elements, item)])
    return changes


class DeltaChain:
    """The newest steps, in at most `most_bytes` of memory. Thread-safe.

    shards_of(version): the rank's shards of a version while a snapshot holds it, else None; called from a thread
    """

    def __init__(
        self, name: str, layout: Layout, most_bytes: int, shards_of: Callable[[Version], Shards | None]
    ) -> None:
        self._layout, self._most_bytes, self._shards_of = layout, most_bytes, shards_of
        self._routing = threading.Lock()  # one plan after another; `published` does not wait for it
        self._changed = threading.Condition()  # guards all below
        self._steps: deque[DeltaStep] = deque()  # oldest first
        self._published: Version | None = None
        self._to_make: deque[tuple[Version, Version]] = deque()  # (base, version); the first is being made
        self._wanted = self._closing = False
        self._finding: SideStream | None = None  # the thread's own
        self._thread = threading.Thread(target=self._run, name=f"weight deltas, {name}", daemon=True)
        self._thread.start()

    def published(self, version: Version) -> None:
        """A new version can be read. Returns at once."""
        with self._changed:
            if self._wanted and self._published is not None:
                self._to_make.append((self._published, version))
            self._published = version
            self._changed.notify_all()

    def find(
        self,
        base: Version | None,
        version: Version,
        source: SourcePlan,
        wait_s: float,
        *,
        deflated: bool,
        still_wanted: Callable[[], None] = lambda: None,
    ) -> Deltas | None:
        """The steps from `base` to `version` for a plan, deflated or not; None where they are not there in `wait_s`, or
        are no fewer bytes than the plan.

        Waits for a step that is being made. Steps are made from the first call on. `still_wanted()` is called while
        messages are made, and may raise.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            self._wanted = True
            if base is None:
                return None
            self._changed.wait_for(lambda: self._closing or self._made(version), max(0.0, wait_s))
            steps = self._path(base, version)
        if steps is None:
            return None

        def in_time() -> bool:
            still_wanted()
            return not self._closing and time.monotonic() < deadline

        found: list[Messages] = []
        left = source.bytes
        for step in steps:
            messages = self._routed(step, source, deflated, deadline, in_time)
            if messages is None:
                return None
            found.append(messages)
            left -= sum(map(len, messages))
            if left <= 0:
                return None
        return found

    @property
    def bytes(self) -> int:
        """Memory that the steps take."""
        with self._changed:
            return sum(step.bytes for step in self._steps)

    def close(self) -> None:
        """May be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _made(self, version: Version) -> bool:
        """Whether there is nothing to wait for: the step to this version is there, or will not come."""
        published = self._published is not None and self._published >= version
        return published and all(later > version for _, later in self._to_make)

    def _path(self, base: Version, version: Version) -> list[DeltaStep] | None:
        """Backwards from `version`."""
        path: list[DeltaStep] = []
        at = version
        for step in reversed(self._steps):
            if at == base or len(path) == MOST_STEPS:
                break
            if step.version == at:
                path.append(step)
                at = step.base
        return path[::-1] if at == base else None

    def _routed(
        self,
        step: DeltaStep,
        source: SourcePlan,
        deflated: bool,
        deadline: float,
        in_time: Callable[[], bool],
    ) -> Messages | None:
        """The messages of a step for a plan; None where they are not made in time."""
        key = source, deflated
        if not self._routing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return None
        try:
            if key in step.routed:
                return step.routed[key]
            messages = route(step, source, self._layout, deflated=deflated, in_time=in_time)
            if messages is not None:
                with self._changed:
                    step.routed[key] = messages
                    self._evict()
            return messages
        finally:
            self._routing.release()

    def _evict(self) -> None:
        while self.bytes > self._most_bytes:
            self._steps.popleft()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._to_make)
                if self._closing:
                    return
                base, version = self._to_make[0]
            step = None
            try:
                step = self._make(base, version)
            except Exception:  # without it this version is taken in full
                log.exception("no delta from version %d to %d", base, version)
            with self._changed:
                self._to_make.popleft()
                if step is not None:
                    self._steps.append(step)
                    self._evict()
                self._changed.notify_all()

    def _make(self, base: Version, version: Version) -> DeltaStep | None:
        old, new = self._shards_of(base), self._shards_of(version)
        if old is None or new is None:
            return None
        self._finding = self._finding or SideStream(new.device)
        with self._finding.entered():
            return make_step(
                base,
                version,
                old,
                new,
                lambda: not self._closing and None not in (self._shards_of(base), self._shards_of(version)),
            )
