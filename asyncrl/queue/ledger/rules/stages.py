"""Which groups wait for which stage.

    commit ──▸ READY ── has what the stage needs ──▸ waiting ──▸ leased ──▸ has what the stage adds ──▸ next stage
                                                        ▴           │
                                                        └───────────┘ expired, given back

A group waits for a stage while it is READY, has the stage's `needs` and lacks some of what it `adds`. The lowest
ordinal goes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from asyncrl.queue.ledger.task_record import TaskRecord
from asyncrl.queue.protocol.settings import StageSettings


class Waiting:
    """A set of ordinals that gives its lowest. Discarded ones are skipped when they come up."""

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._members)

    def add(self, ordinal: int) -> None:
        if ordinal not in self._members:
            self._members.add(ordinal)
            heapq.heappush(self._heap, ordinal)

    def discard(self, ordinal: int) -> None:
        self._members.discard(ordinal)

    def lowest(self) -> int | None:
        while self._heap and self._heap[0] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def members(self) -> list[int]:
        return sorted(self._members)


class Stages:
    def __init__(self, stages: Sequence[StageSettings] = ()) -> None:
        self.by_name = {stage.name: stage for stage in stages}
        self.waiting = {stage.name: Waiting() for stage in stages}
        self.lacking = dict.fromkeys(self.by_name, 0)  # READY groups that the stage has not done yet

    def enter(self, ordinal: int, item: TaskRecord) -> None:
        """The group is READY."""
        for name in self.missing(item):
            self.lacking[name] += 1
        self.offer(ordinal, item)

    def leave(self, ordinal: int, item: TaskRecord) -> None:
        """It is READY no longer."""
        for name in self.missing(item):
            self.lacking[name] -= 1
            self.waiting[name].discard(ordinal)

    def offer(self, ordinal: int, item: TaskRecord) -> None:
        """Let it wait for every stage that may have it now."""
        for name in self.missing(item):
            if name not in item.staging and item.has(self.by_name[name].needs):
                self.waiting[name].add(ordinal)

    def missing(self, item: TaskRecord) -> list[str]:
        """The stages that would add something to it."""
        return [name for name, stage in self.by_name.items() if not item.has(stage.adds)]
