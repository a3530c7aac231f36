"""What generators and stages ask of a ledger: leases, and what comes of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from asyncrl.errors import RefusedError
from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.commands import Commands
from asyncrl.queue.ledger.rules.admission import leasable
from asyncrl.queue.ledger.rules.leases import TASK, Lease
from asyncrl.queue.ledger.task_record import State
from asyncrl.types import NO_VERSION, Version

MAX_PROGRESS = 64 << 20
"""Bytes that are kept of an unfinished task."""


class Grant(NamedTuple):
    """A lease: `epoch` must come with the commit."""

    ordinal: int
    epoch: int


class GeneratorCommands(Commands):
    """A lease is for a task, or for one stage of a ready group; both end, expire and are fenced alike."""

    # ------------------------------------------------------------------ tasks

    def lease(self, worker: str, held: Version, lineage: int, most: int, now: float) -> list[Grant]:
        """Up to `most` of the lowest pending tasks that a worker holding version `held` may start now."""
        settings, book = self.require_open(), self.book
        if lineage != book.lineage:
            raise RefusedError("lineage", f"the stream is at lineage {book.lineage}, the worker at {lineage}")
        grants: list[Grant] = []
        while len(grants) < most and leasable(book, held):
            ordinal = book.pending[0]
            self.apply(ev.Leased(ordinal, worker, book.grants + 1, held, now, now + settings.lease_s))
            grants.append(Grant(ordinal, book.items[ordinal].epoch))
        return grants

    def progress(self, ordinal: int, epoch: int, nbytes: int) -> None:
        """Keep what is finished of a leased task for whoever may lease it next; it replaces what was kept before.

        The next lease then counts as held at the lower of both versions: what is reused was admitted under that one,
        and ranks only fall, so it still is.
        """
        self.require_open()
        self.require_lease(ordinal, epoch, TASK)
        if not 0 <= nbytes <= MAX_PROGRESS:
            raise RefusedError("full", f"{nbytes} bytes of an unfinished task; {MAX_PROGRESS} are kept")
        self.apply(ev.Progressed(ordinal, nbytes))

    def commit(
        self,
        ordinal: int,
        epoch: int,
        tokens: int,
        nbytes: int,
        start_version: Version,
        digest: int,
        columns: Collection[str] = (),
        squares: int = 0,
    ) -> bool:
        """LEASED to READY. False if this very commit was made before.

        RefusedError 'fenced': the lease is not the current one. 'stale': the group is older than its lease
        promised, so training on it could break the bound; the task goes back to pending.
        """
        settings = self.require_open()
        if min(tokens, nbytes, squares) < 0:
            raise RefusedError("malformed", f"{tokens} tokens, {nbytes} bytes, squares of {squares}")
        item = self.book.items.get(ordinal)
        if item is None or item.epoch != epoch:
            raise fenced(ordinal)
        if item.state is not State.LEASED:
            if item.digest != digest:
                raise RefusedError("fenced", f"ordinal {ordinal} was committed with other content")
            return False
        if settings.max_staleness is not None and NO_VERSION < start_version < item.held:
            held = item.held
            self.apply(ev.Requeued(ordinal, "stale"))
            raise RefusedError("stale", f"a token of version {start_version} under a lease for {held}")
        have = tuple(sorted(columns))
        self.apply(ev.Committed(ordinal, tokens, nbytes, start_version, digest, have, squares))
        return True

    def drop(self, ordinal: int, epoch: int, reason: str) -> None:
        """A leased task that cannot be finished ends as DROPPED(reason)."""
        self.require_open()
        self.require_lease(ordinal, epoch, TASK)
        self.apply(ev.Dropped(ordinal, reason))

    # ------------------------------------------------------------------ stages

    def stage_lease(self, stage: str, worker: str, most: int, now: float) -> list[Grant]:
        """Up to `most` of the lowest ready groups that wait for the stage."""
        settings, book = self.require_open(), self.book
        self.require_stage(stage)
        grants: list[Grant] = []
        while len(grants) < most and (ordinal := book.stages.waiting[stage].lowest()) is not None:
            deadline = now + settings.lease_s
            self.apply(ev.StageLeased(stage, ordinal, worker, book.grants + 1, now, deadline))
            grants.append(Grant(ordinal, book.items[ordinal].staging[stage]))
        return grants

    def stage_commit(
        self, stage: str, ordinal: int, epoch: int, nbytes: int, version: Version, digest: int
    ) -> bool:
        """The group gets the stage's columns. False if this very commit was made before."""
        self.require_open()
        self.require_stage(stage)
        if nbytes < 0:
            raise RefusedError("malformed", f"{nbytes} bytes")
        item = self.book.items.get(ordinal)
        added = None if item is None else item.added.get(stage)
        if added is not None and (added.epoch, added.digest) == (epoch, digest):
            return False
        self.require_lease(ordinal, epoch, stage)
        self.apply(ev.StageCommitted(stage, ordinal, nbytes, version, digest))
        return True

    def stage_drop(self, stage: str, ordinal: int, epoch: int, reason: str) -> None:
        """A group that the stage cannot do ends as DROPPED(reason)."""
        self.require_open()
        self.require_lease(ordinal, epoch, stage)
        self.apply(ev.Dropped(ordinal, reason))

    # ------------------------------------------------------------------ leases of both

    def renew(self, leases: Iterable[tuple[int, int]], now: float) -> list[tuple[int, int]]:
        """Extend the (ordinal, epoch) leases that still stand; return those that do not."""
        stands: list[int] = []
        lost: list[tuple[int, int]] = []
        for ordinal, epoch in leases:
            if self.book.leases.get(ordinal, epoch) is not None:
                stands.append(epoch)
            else:
                lost.append((ordinal, epoch))
        if stands and self.book.settings is not None:
            self.apply(ev.Renewed(tuple(stands), now + self.book.settings.lease_s))
        return lost

    def expire(self, now: float) -> list[int]:
        """Leases past their deadline end: tasks are pending again, groups wait for their stage again."""
        expired = self.book.leases.expired(now)
        for lease in expired:
            self._return(lease, "expired")
        return [lease.ordinal for lease in expired]

    def give_back(self, leases: Iterable[tuple[int, int]]) -> None:
        """As if they had expired, at once; leases that are over are ignored."""
        for ordinal, epoch in leases:
            lease = self.book.leases.get(ordinal, epoch)
            if lease is not None:
                self._return(lease, "given_back")

    def leases_of(self, worker: str) -> list[tuple[int, int]]:
        return [(lease.ordinal, lease.epoch) for lease in self.book.leases.of(worker)]

    # ------------------------------------------------------------------ checks

    def _return(self, lease: Lease, why: str) -> None:
        if lease.stage == TASK:
            self.apply(ev.Requeued(lease.ordinal, why))
        else:
            self.apply(ev.StageReturned(lease.stage, lease.ordinal, why))

    def require_lease(self, ordinal: int, epoch: int, stage: str) -> None:
        lease = self.book.leases.get(ordinal, epoch)
        if lease is None or lease.stage != stage:
            raise fenced(ordinal)

    def require_stage(self, stage: str) -> None:
        if stage not in self.book.stages.by_name:
            names = ", ".join(self.book.stages.by_name) or "none"
            raise RefusedError("unknown_stage", f"{stage!r}; this stream has: {names}")


def fenced(ordinal: int) -> RefusedError:
    return RefusedError("fenced", f"the lease of ordinal {ordinal} is over")
