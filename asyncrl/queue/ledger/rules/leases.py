"""The leases of a stream, of its tasks and of its stages alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

TASK = ""
"""The stage of a lease that is for the task itself."""


@dataclass(slots=True)
class Lease:
    """The right of `worker` to do one task, or one stage of its group, while it renews in time."""

    ordinal: int
    stage: str
    worker: str
    epoch: int
    at: float
    deadline: float


class Leases:
    """By epoch, which is unique over all leases of a run."""

    def __init__(self) -> None:
        self._by_epoch: dict[int, Lease] = {}
        self._earliest = math.inf  # no lease ends before

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._by_epoch.values())

    def grant(self, lease: Lease) -> None:
        self._by_epoch[lease.epoch] = lease
        self._earliest = min(self._earliest, lease.deadline)

    def get(self, ordinal: int, epoch: int) -> Lease | None:
        """The lease, if it still stands."""
        lease = self._by_epoch.get(epoch)
        return lease if lease is not None and lease.ordinal == ordinal else None

    def renew(self, epochs: Iterable[int], deadline: float) -> None:
        for epoch in epochs:
            self._by_epoch[epoch].deadline = deadline

    def renew_all(self, at: float, deadline: float) -> None:
        """Under a new clock."""
        for lease in self._by_epoch.values():
            lease.at, lease.deadline = at, deadline
        self._earliest = deadline if self._by_epoch else math.inf

    def end(self, epoch: int) -> None:
        del self._by_epoch[epoch]

    def expired(self, now: float) -> list[Lease]:
        """Those past their deadline, lowest ordinal first; all are looked at only when one may be."""
        if now <= self._earliest:
            return []
        standing = [lease.deadline for lease in self if lease.deadline >= now]
        self._earliest = min(standing, default=math.inf)
        return sorted((x for x in self if x.deadline < now), key=lambda lease: (lease.ordinal, lease.epoch))

    def of(self, worker: str) -> list[Lease]:
        return sorted((x for x in self if x.worker == worker), key=lambda lease: (lease.ordinal, lease.epoch))
