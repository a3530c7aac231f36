"""Whether the lowest pending task may start: the staleness bound, the lead, and room for its bytes.

    the bound   rank(o) < F(held + S + 1): see ledger.py
    the lead    rank(o) < groups trained + lead: no further ahead of the learner than its waiting requires
    room        `depth` groups leased, ready or claimed ahead; `max_bytes` of payload, with what leased groups are
                expected to weigh

A task that the learner may be waiting for is leased even if there is no room. Otherwise learner and generators could
deadlock. Where such a task is leased for long and nothing else may start, it is leased to a second worker too.
"""

from __future__ import annotations

from asyncrl.queue.ledger.state.ledger_state import LedgerState
from asyncrl.types import Version


def leasable(state: LedgerState, held: Version) -> bool:
    """For a worker that holds version `held`."""
    tasks = state.tasks
    if not tasks.pending:
        return False
    ordinal = tasks.pending[0]
    rank, limit = tasks.ranks.rank(ordinal), admitted_below(state, held)
    if tasks.records[ordinal].min_version > held or (limit is not None and rank >= limit):
        return False
    return not _beyond_lead(state, rank) and (_waited_for(state, rank) or _has_room(state))


def hedgeable(state: LedgerState, held: Version, worker: str, now: float) -> int | None:
    """The lowest leased task, if the learner may wait for it and another worker has had it for `hedge_s`.

    None: no such task, or a worker that holds version `held` may not make it. Two leases of a task are the most.
    """
    settings, tasks, leases = state.settings, state.tasks, state.leases
    assert settings is not None
    if settings.hedge_s is None or not tasks.leased or not leases.older_than(settings.hedge_s, now):
        return None
    ordinal = min(tasks.leased)
    task, rank, limit = tasks.records[ordinal], tasks.ranks.rank(ordinal), admitted_below(state, held)
    lease = leases.by_epoch[task.epoch]
    admitted = task.min_version <= held and (limit is None or rank < limit)
    old = lease.worker != worker and now - lease.at > settings.hedge_s
    return ordinal if old and admitted and ordinal not in leases.hedged and _waited_for(state, rank) else None


def admitted_below(state: LedgerState, held: Version) -> int | None:
    """F(held + S + 1): the rank below which a worker holding `held` may start. None: no bound.

    A worker ahead of the ledger counts as being level.
    """
    assert state.settings is not None
    if state.settings.max_staleness is None:
        return None
    return trained_by(state, min(held, state.steps.version) + state.settings.spare_versions + 1)


def trained_by(state: LedgerState, version: Version) -> int:
    """F: groups trained when `version` is published. A step to come counts as it is recorded, or B groups."""
    assert state.settings is not None
    steps, groups = state.steps, state.settings.groups_per_version
    if version <= steps.version:
        # Forgotten versions were published at or before the frontier, where nothing is pending.
        return steps.published.get(version, 0)
    total = steps.published[steps.version]
    if not steps.replay:
        return total + (version - steps.version) * groups
    for step in range(steps.version, version):
        recorded = steps.replay.get(step)
        total += recorded.size if recorded is not None and recorded.whole else groups
    return total


def _beyond_lead(state: LedgerState, rank: int) -> bool:
    if state.lead is None:
        return False
    return rank >= trained_by(state, state.steps.version + state.steps.repeated) + state.lead.groups


def _waited_for(state: LedgerState, rank: int) -> bool:
    """Inside the window. A synchronous learner may wait for a whole batch at once."""
    settings = state.settings
    assert settings is not None
    waited_for = settings.groups_per_version if settings.max_staleness == 0 else settings.window or 1
    # What was claimed ahead is here, and the learner waits for nothing more yet.
    head = min([*state.ahead, state.tasks.head])
    return rank < state.tasks.ranks.rank(head) + waited_for


def _has_room(state: LedgerState) -> bool:
    assert state.settings is not None
    if state.tasks.in_stock + len(state.ahead) >= state.settings.depth:
        return False
    return state.usage.live + state.reserved + state.usage.group <= state.settings.max_bytes
