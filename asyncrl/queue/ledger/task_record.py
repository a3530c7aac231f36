"""The record of one task."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncrl.types import NO_VERSION, Version


class State(enum.Enum):
    """Where a task is. The last two are ends; a task that has ended is not kept."""

    PENDING = "pending"
    LEASED = "leased"
    READY = "ready"  # committed, maybe without all the columns that a claim needs
    CLAIMED = "claimed"
    RECORDED = "recorded"  # trained on a branch that a rewind left; the same step claims it again
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Column:
    """The columns that one stage added to a group. version: of the policy that they depend on."""

    epoch: int
    digest: int
    version: Version


@dataclass(slots=True)
class TaskRecord:
    """One task that has not ended.

    epoch    of the last lease, -1: none stands and nothing is committed
    held     the lowest version that may have made a token of what is kept or under way
    progress what earlier leases finished of the task is kept, made under `held` or newer versions
    squares  of its rollouts' lengths, added up: what their attention costs goes by it
    nbytes   all bytes kept beside the task itself
    lost     a group that was claimed before they were lost: who has got it may train on it, nobody gets it any more
    staging  stage -> epoch of the lease that stands there
    added    stage -> what it added
    """

    state: State
    min_version: Version = 0
    epoch: int = -1
    held: Version = NO_VERSION
    progress: bool = False
    tokens: int = 0
    squares: int = 0
    nbytes: int = 0
    start_version: Version = NO_VERSION
    digest: int = 0
    columns: frozenset[str] = frozenset()
    staging: dict[str, int] = field(default_factory=dict)
    added: dict[str, Column] = field(default_factory=dict)
    lost: bool = False

    def has(self, columns: Iterable[str]) -> bool:
        return self.columns.issuperset(columns)
