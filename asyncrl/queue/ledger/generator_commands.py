"""The commands of generators and stages: leases, and their outcomes.

A lease is for a task, or for one stage of a ready group; both end, expire and are fenced alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import NamedTuple

from asyncrl.errors import RefusedError
from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.admission import hedgeable, leasable
from asyncrl.queue.ledger.ledger import MAX_REASON, Ledger
from asyncrl.queue.ledger.state.leases import TASK, LeaseRecord
from asyncrl.queue.ledger.state.tasks import State
from asyncrl.queue.protocol import requests as rq
from asyncrl.types import NO_VERSION

MAX_PROGRESS = 64 << 20
"""Bytes that are kept of an unfinished task."""

Fits = Callable[[int], bool]
"""Whether the reply has room for one more ordinal, which it has to take then."""

_COMMITTED = attrgetter(*ev.Committed._fields)


class Grant(NamedTuple):
    """A lease: `epoch` must come with the commit."""

    ordinal: int
    epoch: int


# ---------------------------------------------------------------------- tasks


def lease(
    ledger: Ledger, request: rq.LeaseRequest, worker: str, now: float, fits: Fits = lambda ordinal: True
) -> list[Grant]:
    """Lease up to `most` of the lowest pending tasks that a worker holding version `held` may start now. All fit.

    If there is none, maybe a task that another worker has had for long: the first of the two groups counts.
    """
    settings, state = ledger.require_open(), ledger.state
    if request.lineage != state.lineage:
        raise RefusedError(
            "lineage", f"the stream is at lineage {state.lineage}, the worker at {request.lineage}"
        )
    grants: list[Grant] = []
    while len(grants) < request.most and leasable(state, request.held) and fits(state.tasks.pending[0]):
        ordinal, grant = state.tasks.pending[0], state.leases.grants + 1
        ledger.apply(ev.Leased(ordinal, worker, grant, request.held, now, now + settings.lease_s))
        grants.append(Grant(ordinal, state.tasks.records[ordinal].epoch))
    if not grants:
        hedged = hedgeable(state, request.held, worker, now)
        if hedged is not None and fits(hedged):
            grant, deadline = state.leases.grants + 1, now + settings.lease_s
            ledger.apply(ev.Hedged(hedged, worker, grant, request.held, now, deadline))
            grants.append(Grant(hedged, state.tasks.records[hedged].epoch))
    return grants


def progress(ledger: Ledger, request: rq.ProgressRequest) -> None:
    """Keep the finished part of a leased task for the next lease; it replaces the part kept before.

    The next lease gets `held` = the lower of both workers' versions. The kept part was admitted under the earlier one;
    a task's rank only decreases, so it stays admitted.
    """
    ledger.require_open()
    require_lease(ledger, request.ordinal, request.epoch, TASK)
    if not 0 <= request.nbytes <= MAX_PROGRESS:
        raise RefusedError("full", f"{request.nbytes} bytes of an unfinished task; {MAX_PROGRESS} are kept")
    ledger.apply(ev.Progressed(request.ordinal, request.nbytes))


def commit(ledger: Ledger, request: rq.CommitRequest) -> bool:
    """LEASED to READY. Returns False if this very commit was made before.

    Raises:
        RefusedError: 'fenced', the lease is not the current one. 'stale', the group is older than its lease
            promised, so training on it could break the bound; the task goes back to pending.
    """
    settings = ledger.require_open()
    if min(request.tokens, request.nbytes, request.squares) < 0:
        raise RefusedError(
            "malformed", f"{request.tokens} tokens, {request.nbytes} bytes, squares of {request.squares}"
        )
    ordinal = request.ordinal
    task = ledger.state.tasks.records.get(ordinal)
    if task is not None and ledger.state.leases.hedged.get(ordinal) == request.epoch:
        ledger.apply(ev.HedgeEnded(ordinal, task.epoch, "lost"))
    if task is None or task.state is State.PENDING or task.epoch != request.epoch:
        raise fenced(ordinal)
    if task.state is not State.LEASED:
        if task.digest != request.digest:
            raise RefusedError("fenced", f"ordinal {ordinal} was committed with other content")
        return False
    if settings.max_staleness is not None and NO_VERSION < request.start_version < task.held:
        held = task.held
        ledger.apply(ev.Requeued(ordinal, "stale"))
        raise RefusedError("stale", f"a token of version {request.start_version} under a lease for {held}")
    committed = ev.Committed._make(_COMMITTED(request))
    if len(request.columns) > 1:
        committed = committed._replace(columns=tuple(sorted(request.columns)))
    ledger.apply(committed)
    return True


def drop(ledger: Ledger, request: rq.DropRequest | rq.StageDropRequest) -> None:
    """A leased task that cannot be finished, or a group that its stage cannot process, ends as DROPPED(reason)."""
    ledger.require_open()
    stage = request.stage if isinstance(request, rq.StageDropRequest) else TASK
    require_lease(ledger, request.ordinal, request.epoch, stage)
    ledger.apply(ev.Dropped(request.ordinal, request.reason[:MAX_REASON]))


# ---------------------------------------------------------------------- stages


def stage_lease(
    ledger: Ledger, request: rq.StageLeaseRequest, worker: str, now: float, fits: Fits = lambda ordinal: True
) -> list[Grant]:
    """Lease up to `most` of the lowest ready groups that wait for the stage, and that fit."""
    settings, state, stage = ledger.require_open(), ledger.state, request.stage
    require_stage(ledger, stage)
    grants: list[Grant] = []
    while len(grants) < request.most and (waiting := state.stages.waiting[stage]) and fits(waiting[0]):
        ordinal, grant = waiting[0], state.leases.grants + 1
        ledger.apply(ev.StageLeased(stage, ordinal, worker, grant, now, now + settings.lease_s))
        grants.append(Grant(ordinal, state.tasks.records[ordinal].staging[stage]))
    return grants


def stage_commit(ledger: Ledger, request: rq.StageCommitRequest) -> bool:
    """The group gets the stage's columns. Returns False if this very commit was made before."""
    ledger.require_open()
    require_stage(ledger, request.stage)
    if request.nbytes < 0:
        raise RefusedError("malformed", f"{request.nbytes} bytes")
    task = ledger.state.tasks.records.get(request.ordinal)
    added = None if task is None else task.added.get(request.stage)
    if added is not None and (added.epoch, added.digest) == (request.epoch, request.digest):
        return False
    require_lease(ledger, request.ordinal, request.epoch, request.stage)
    ledger.apply(ev.StageCommitted(*(getattr(request, name) for name in ev.StageCommitted._fields)))
    return True


# ---------------------------------------------------------------------- leases of both


def renew(ledger: Ledger, leases: Iterable[tuple[int, int]], now: float) -> list[tuple[int, int]]:
    """Extend the (ordinal, epoch) leases that still stand; return those that do not."""
    stands: list[int] = []
    lost: list[tuple[int, int]] = []
    for ordinal, epoch in leases:
        if ledger.state.leases.get(ordinal, epoch) is not None:
            stands.append(epoch)
        else:
            lost.append((ordinal, epoch))
    if stands and ledger.state.settings is not None:
        ledger.apply(ev.Renewed(tuple(stands), now + ledger.state.settings.lease_s))
    return lost


def expire(ledger: Ledger, now: float) -> list[int]:
    """Leases past their deadline end: tasks are pending again, groups wait for their stage again."""
    expired = ledger.state.leases.expired(now)
    for each in expired:
        _return(ledger, each, "expired")
    return [each.ordinal for each in expired]


def give_back(ledger: Ledger, leases: Iterable[tuple[int, int]], why: str = "given_back") -> None:
    """Return leases at once; leases that are over are ignored."""
    for ordinal, epoch in leases:
        standing = ledger.state.leases.get(ordinal, epoch)
        if standing is not None:
            _return(ledger, standing, why)


# ---------------------------------------------------------------------- checks


def _return(ledger: Ledger, lease: LeaseRecord, why: str) -> None:
    if lease.stage != TASK:
        ledger.apply(ev.StageReturned(lease.stage, lease.ordinal, why))
    elif lease.ordinal in ledger.state.leases.hedged:
        ledger.apply(ev.HedgeEnded(lease.ordinal, lease.epoch, why))
    else:
        ledger.apply(ev.Requeued(lease.ordinal, why))


def require_lease(ledger: Ledger, ordinal: int, epoch: int, stage: str) -> None:
    standing = ledger.state.leases.get(ordinal, epoch)
    if standing is None or standing.stage != stage:
        raise fenced(ordinal)


def require_stage(ledger: Ledger, stage: str) -> None:
    if stage not in ledger.state.stages.by_name:
        names = ", ".join(ledger.state.stages.by_name) or "none"
        raise RefusedError("unknown_stage", f"{stage!r}; this stream has: {names}")


def fenced(ordinal: int) -> RefusedError:
    return RefusedError("fenced", f"the lease of ordinal {ordinal} is over")
