"""The groups that wait for each stage.

    commit ──▸ READY ── has what the stage needs ──▸ waiting ──▸ leased ──▸ has what the stage adds ──▸ next stage
                                                        ▴           │
                                                        └───────────┘ expired, given back

A group waits for a stage while it is READY, has the stage's `needs` and lacks some of what it `adds`. The lowest
ordinal goes first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.queue.ledger.state.tasks import TaskRecord
from asyncrl.queue.protocol.settings import StageSettings


@dataclass(slots=True)
class Stages:
    """waiting: sorted ordinals, by stage · lacking: READY groups that the stage has not done yet"""

    by_name: dict[str, StageSettings] = field(default_factory=dict)
    waiting: dict[str, list[int]] = field(default_factory=dict)
    lacking: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, stages: Sequence[StageSettings]) -> Stages:
        """With no group waiting."""
        names = [stage.name for stage in stages]
        return cls(
            dict(zip(names, stages, strict=True)), {name: [] for name in names}, dict.fromkeys(names, 0)
        )

    def enter(self, ordinal: int, task: TaskRecord) -> None:
        """The group is READY."""
        for name in self.missing(task):
            self.lacking[name] += 1
        self.offer(ordinal, task)

    def leave(self, ordinal: int, task: TaskRecord) -> None:
        """It is READY no longer."""
        for name in self.missing(task):
            self.lacking[name] -= 1
            self.withdraw(ordinal, name)

    def offer(self, ordinal: int, task: TaskRecord) -> None:
        """Let it wait for every stage that may have it now."""
        for name in self.missing(task):
            if name not in task.staging and task.has(self.by_name[name].needs):
                waiting = self.waiting[name]
                at = bisect_left(waiting, ordinal)
                if waiting[at : at + 1] != [ordinal]:
                    waiting.insert(at, ordinal)

    def withdraw(self, ordinal: int, stage: str) -> None:
        """It waits for the stage no longer, if it did."""
        waiting = self.waiting[stage]
        at = bisect_left(waiting, ordinal)
        if waiting[at : at + 1] == [ordinal]:
            del waiting[at]

    def missing(self, task: TaskRecord) -> list[str]:
        """The stages that would add something to it."""
        return [name for name, stage in self.by_name.items() if not task.has(stage.adds)]
