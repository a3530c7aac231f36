"""The tasks of a stream: those that have not ended, by ordinal and by state, and the count of those that have."""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncrl.queue.protocol.settings import Frontier
from asyncrl.types import NO_VERSION, Version

CORRUPT = "corrupt"
"""The reason of groups that nobody who got them could read."""

DRAINED = "drained"
"""The reason of tasks that a drain kept from being leased."""

END = "end"
"""The reason of tasks that the end of the run cut off."""

MAX_REASONS = 64
"""Distinct drop reasons that are counted apart; reasons come from outside, and memory must stay bounded."""


class State(enum.Enum):
    """Where a task is. One that has ended, as trained or dropped, is not kept."""

    PENDING = "pending"
    LEASED = "leased"
    READY = "ready"  # committed, maybe without all the columns that a claim needs
    CLAIMED = "claimed"
    AHEAD = "ahead"  # claimed for the step after the running one
    RECORDED = "recorded"  # trained on a branch that a rewind left; the same step claims it again


TAKEN = frozenset({State.CLAIMED, State.AHEAD, State.RECORDED})
"""States of groups that no other claim may take."""


@dataclass(frozen=True, slots=True)
class Column:
    """The columns that one stage added to a group. version: of the policy that they depend on."""

    epoch: int
    digest: int
    version: Version


@dataclass(slots=True)
class TaskRecord:
    """One task that has not ended.

    epoch    fencing token: of the lease that stands, or that committed the group; -1 while the task is pending
    held     the lowest version that may have made a token of what is kept or under way
    progress what earlier leases finished of the task is kept, made under `held` or newer versions
    squares  of its segments' lengths, added up: what their attention costs goes by it
    nbytes   all bytes kept beside the task itself
    lost     the payload of this claimed group is lost: a rank that has received it may train on it, no other can get it
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


@dataclass(slots=True)
class OrdinalIndex:
    """The rank of an ordinal: how many ordinals below it are not dropped.

    Only ordinals at or above the frontier (the lowest one that has not ended) are remembered, so that memory follows
    the live tasks and not the length of the run. kept: trained ordinals below the frontier · dropped: sorted

    >>> ranks = OrdinalIndex()
    >>> ranks.drop(1); ranks.train(0); ranks.frontier, ranks.rank(4)
    (2, 3)
    """

    frontier: int = 0
    kept: int = 0
    trained: set[int] = field(default_factory=set)
    dropped: list[int] = field(default_factory=list)

    def rank(self, ordinal: int) -> int:
        """The rank of an ordinal at or above the frontier."""
        return self.kept + ordinal - self.frontier - bisect_left(self.dropped, ordinal)

    @property
    def trained_total(self) -> int:
        return self.kept + len(self.trained)

    def ended(self, ordinal: int) -> bool:
        return ordinal < self.frontier or ordinal in self.trained or self._is_dropped(ordinal)

    def train(self, ordinal: int) -> None:
        self.trained.add(ordinal)
        self._advance()

    def drop(self, ordinal: int) -> None:
        insort(self.dropped, ordinal)
        self._advance()

    def _is_dropped(self, ordinal: int) -> bool:
        at = bisect_left(self.dropped, ordinal)
        return at < len(self.dropped) and self.dropped[at] == ordinal

    def _advance(self) -> None:
        passed = 0
        while True:
            if self.frontier in self.trained:
                self.trained.remove(self.frontier)
                self.kept += 1
            elif passed < len(self.dropped) and self.dropped[passed] == self.frontier:
                passed += 1
            else:
                break
            self.frontier += 1
        del self.dropped[:passed]


@dataclass(slots=True)
class Tasks:
    """records: of the tasks that have not ended, by ordinal.

    next     the ordinal to be submitted next
    head     the lowest ordinal that nobody has claimed and that has not ended
    pending  a heap
    ready    sorted; those that a claim may take, with `ready_tokens` tokens together
    partial  ready, but for columns that a claim needs
    dropped  how many, by reason
    """

    ranks: OrdinalIndex = field(default_factory=OrdinalIndex)
    records: dict[int, TaskRecord] = field(default_factory=dict)
    next: int = 0
    head: int = 0
    pending: list[int] = field(default_factory=list)
    leased: set[int] = field(default_factory=set)
    ready: list[int] = field(default_factory=list)
    ready_tokens: int = 0
    partial: set[int] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)

    @classmethod
    def after(cls, frontier: Frontier) -> Tasks:
        """The tasks that had ended at the frontier, and no others."""
        ranks = OrdinalIndex(
            frontier.frontier, frontier.kept, set(frontier.trained), sorted(frontier.dropped_ordinals)
        )
        return cls(ranks, next=ranks.frontier, head=ranks.frontier, dropped=Counter(frontier.dropped))

    @property
    def in_stock(self) -> int:
        """Groups leased or ready: what `depth` is about."""
        return len(self.leased) + len(self.ready) + len(self.partial)

    @property
    def to_come(self) -> bool:
        """Whether groups may still become ready for a claim."""
        return bool(self.pending or self.leased or self.partial)

    def enter_ready(self, ordinal: int, task: TaskRecord, columns: Iterable[str]) -> None:
        """columns: those that a claim needs."""
        task.state = State.READY
        if task.has(columns):
            insort(self.ready, ordinal)
            self.ready_tokens += task.tokens
        else:
            self.partial.add(ordinal)

    def leave_ready(self, ordinal: int, task: TaskRecord) -> None:
        if ordinal in self.partial:
            self.partial.remove(ordinal)
        else:
            del self.ready[bisect_left(self.ready, ordinal)]
            self.ready_tokens -= task.tokens

    def end(self, ordinal: int, dropped: str | None) -> TaskRecord:
        """The task is trained, or dropped for that reason. Returns its record, which is not kept here."""
        if dropped is None:
            self.ranks.train(ordinal)
        else:
            self.ranks.drop(ordinal)
            known = dropped in self.dropped or len(self.dropped) < MAX_REASONS
            self.dropped[dropped if known else "other"] += 1
        return self.records.pop(ordinal)

    def move_head(self) -> None:
        self.head = self.unclaimed_from(max(self.head, self.ranks.frontier))

    def unclaimed_from(self, ordinal: int) -> int:
        """The lowest ordinal from `ordinal` on that is pending, leased or ready."""
        while ordinal < self.next:
            task = self.records.get(ordinal)
            if task is not None and task.state not in TAKEN:
                break
            ordinal += 1
        return ordinal
