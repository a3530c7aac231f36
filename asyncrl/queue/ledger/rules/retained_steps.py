"""Trained steps that no checkpoint holds yet, kept to be handed out again by a rewind.

    version   floor ─────────── c ────────────────── version
    steps       │   retained    │     retained        │ running
                ▴               ▴
      a checkpoint of it is     a learner comes back at c: steps c … are recorded, and claimed again as they were
      committed: released below

A frontier is of this history if no rewind since its lineage went back to before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from asyncrl.queue.ledger.events import StepClaimed
from asyncrl.queue.ledger.task_record import TaskRecord
from asyncrl.queue.protocol.settings import Frontier
from asyncrl.types import Version


@dataclass(slots=True)
class RetainedStep:
    """One step as it was claimed.

    whole   its claims are all it is made of · before   groups trained before it
    items   the records of its groups, while they are out of the state
    """

    claims: list[StepClaimed]
    whole: bool
    before: int = 0
    items: dict[int, TaskRecord] = field(default_factory=dict)

    def ordinals(self) -> Iterator[int]:
        for claim in self.claims:
            for share in claim.shares:
                yield from share

    @property
    def size(self) -> int:
        return sum(len(share) for claim in self.claims for share in claim.shares)


class RetainedSteps:
    """steps: the trained steps from `floor` on, one for every version since."""

    def __init__(self, floor: Version) -> None:
        self.floor = floor
        self.steps: dict[Version, RetainedStep] = {}
        self._forks: dict[int, Version] = {}  # lineage -> the version it began at

    def covers(self, frontier: Frontier, lineage: int, version: Version, trained_total: int) -> bool:
        """Whether every step since `frontier` is here, seen from a stream that stands at the last three."""
        if not self.floor <= frontier.version <= version or frontier.lineage > lineage:
            return False
        since = [began for fork, began in self._forks.items() if fork > frontier.lineage]
        if any(began < frontier.version for began in since):
            return False
        if frontier.version < version:
            trained_total = self.steps[frontier.version].before
        return trained_total == frontier.trained_total

    def release(self, below: Version) -> Iterator[tuple[int, TaskRecord]]:
        """Forget the steps below a version; gives what was kept of each of their groups."""
        for version in range(self.floor, below):
            yield from self.steps.pop(version).items.items()
        self.floor = max(self.floor, below)

    def fork(self, lineage: int, at: Version) -> dict[Version, RetainedStep]:
        """A new lineage begins at version `at`: the steps from there on, which are trained no longer."""
        # An older lineage that forked later than this one tells nothing more.
        self._forks = {fork: began for fork, began in self._forks.items() if began < at}
        self._forks[lineage] = at
        return {version: self.steps.pop(version) for version in sorted(self.steps) if version >= at}
