"""The learner's steps: those it has published, the running one, and those that a rewind lets it claim again.

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
from asyncrl.queue.ledger.state.tasks import TaskRecord
from asyncrl.queue.protocol.settings import Frontier
from asyncrl.types import Version


@dataclass(slots=True)
class RetainedStep:
    """One step as it was claimed.

    whole   its claims are all it is made of · before   groups trained before it
    records of its groups, while they are out of the state
    """

    claims: list[StepClaimed]
    whole: bool
    before: int = 0
    records: dict[int, TaskRecord] = field(default_factory=dict)

    def ordinals(self) -> Iterator[int]:
        for claim in self.claims:
            for share in claim.shares:
                yield from share

    @property
    def size(self) -> int:
        return sum(len(share) for claim in self.claims for share in claim.shares)


@dataclass(slots=True)
class RetainedSteps:
    """Trained steps that no checkpoint holds yet.

    steps   those from `floor` on, one for every version since · forks   lineage -> the version it began at
    """

    floor: Version = 0
    steps: dict[Version, RetainedStep] = field(default_factory=dict)
    forks: dict[int, Version] = field(default_factory=lambda: {0: 0})

    def covers(self, frontier: Frontier, lineage: int, version: Version, trained_total: int) -> bool:
        """Whether every step since `frontier` is here, seen from a stream that stands at the last three."""
        if not self.floor <= frontier.version <= version or frontier.lineage > lineage:
            return False
        since = [began for fork, began in self.forks.items() if fork > frontier.lineage]
        if any(began < frontier.version for began in since):
            return False
        if frontier.version < version:
            trained_total = self.steps[frontier.version].before
        return trained_total == frontier.trained_total

    def release(self, below: Version) -> Iterator[tuple[int, TaskRecord]]:
        """Forget the steps below a version; gives what was kept of each of their groups."""
        for version in range(self.floor, below):
            yield from self.steps.pop(version).records.items()
        self.floor = max(self.floor, below)

    def fork(self, lineage: int, at: Version) -> dict[Version, RetainedStep]:
        """A new lineage begins at version `at`: the steps from there on, which are trained no longer."""
        # An older lineage that forked later than this one is not needed any more.
        self.forks = {fork: began for fork, began in self.forks.items() if began < at}
        self.forks[lineage] = at
        return {version: self.steps.pop(version) for version in sorted(self.steps) if version >= at}


@dataclass(slots=True)
class Steps:
    """version: that of the running step, which is also the one published last.

    published  groups trained when each version was published, for the versions that still matter
    claims     of the running step, by index; `claimed` groups in all
    attempt    how often claims of this stream were taken back
    replay     the steps to be claimed as they were recorded, the running one among them, or the next one, whose first
               claim was made ahead; `recorded` groups to come
    """

    version: Version = 0
    published: dict[Version, int] = field(default_factory=lambda: {0: 0})
    claims: list[StepClaimed] = field(default_factory=list)
    claimed: int = 0
    attempt: int = 0
    replay: dict[Version, RetainedStep] = field(default_factory=dict)
    recorded: int = 0
    retained: RetainedSteps = field(default_factory=RetainedSteps)

    @property
    def repeated(self) -> int:
        """Steps from the running one on that were trained before and are only repeated."""
        return sum(step.whole for step in self.replay.values())

    @property
    def replayed(self) -> bool:
        """Whether the running step is a recorded one and has been claimed as it was."""
        step = self.replay.get(self.version)
        return step is not None and step.whole and len(self.claims) == len(step.claims)

    @property
    def complete(self) -> bool:
        """Whether the last claim of the running step is made."""
        return bool(self.claims) and self.claims[-1].last

    def claimed_ordinals(self) -> set[int]:
        """The ordinals of the running step so far."""
        return {ordinal for claim in self.claims for share in claim.shares for ordinal in share}

    def take_claims(self) -> list[StepClaimed]:
        """The claims of the running step, which has none after that."""
        claims, self.claims, self.claimed = self.claims, [], 0
        return claims
