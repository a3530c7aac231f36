"""The leases of a stream, of its tasks and of its stages alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

TASK = ""
"""The stage of a lease that is for the task itself."""


@dataclass(slots=True)
class LeaseRecord:
    """The right of `worker` to do one task, or one stage of its group, while it renews in time."""

    ordinal: int
    stage: str
    worker: str
    epoch: int
    at: float
    deadline: float


@dataclass(slots=True)
class Leases:
    """The standing leases by epoch, which is unique over all leases of a run.

    earliest: no lease ends before · grants: how many there were so far
    hedged: ordinal -> epoch of the earlier lease of a task that has two; the later one has the task's epoch
    """

    by_epoch: dict[int, LeaseRecord] = field(default_factory=dict)
    earliest: float = math.inf
    grants: int = 0
    hedged: dict[int, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[LeaseRecord]:
        return iter(self.by_epoch.values())

    def grant(self, lease: LeaseRecord) -> None:
        self.by_epoch[lease.epoch] = lease
        self.earliest = min(self.earliest, lease.deadline)

    def get(self, ordinal: int, epoch: int) -> LeaseRecord | None:
        """The lease, if it still stands."""
        lease = self.by_epoch.get(epoch)
        return lease if lease is not None and lease.ordinal == ordinal else None

    def renew(self, epochs: Iterable[int], deadline: float) -> None:
        for epoch in epochs:
            self.by_epoch[epoch].deadline = deadline

    def renew_all(self, at: float, deadline: float) -> None:
        """Under a new clock."""
        for lease in self:
            lease.at, lease.deadline = at, deadline
        self.earliest = deadline if self.by_epoch else math.inf

    def end(self, epoch: int) -> None:
        del self.by_epoch[epoch]

    def end_all(self, ordinal: int, epoch: int) -> None:
        """End both leases of a task, whose later lease has this epoch."""
        self.end(epoch)
        if (earlier := self.hedged.pop(ordinal, None)) is not None:
            self.end(earlier)

    def older_than(self, seconds: float, now: float) -> bool:
        """Whether any lease may be: they stand in the order in which they were granted."""
        oldest = next(iter(self.by_epoch.values()), None)
        return oldest is not None and now - oldest.at > seconds

    def expired(self, now: float) -> list[LeaseRecord]:
        """The leases past their deadline, by ordinal. Scans all leases only if the earliest deadline has passed."""
        if now <= self.earliest:
            return []
        standing = [lease.deadline for lease in self if lease.deadline >= now]
        self.earliest = min(standing, default=math.inf)
        return sorted((x for x in self if x.deadline < now), key=lambda lease: (lease.ordinal, lease.epoch))

    def of(self, worker: str) -> list[tuple[int, int]]:
        """(ordinal, epoch) of each lease of the worker."""
        return sorted((lease.ordinal, lease.epoch) for lease in self if lease.worker == worker)
