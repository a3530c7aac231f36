"""Whether the lowest pending task may start: the staleness bound, the lead, and room for its bytes.

    the bound   rank(o) < F(held + S + 1): see ledger.py
    the lead    rank(o) < groups trained + lead: no further ahead of the learner than its waiting requires
    room        `depth` groups leased or ready; `max_bytes` of payload, with what leased groups are expected to weigh

Tasks that the learner may be waiting for start without room, or learner and generators would wait for each other.
"""

from __future__ import annotations

from asyncrl.queue.ledger.ledger_state import LedgerState
from asyncrl.types import Version


def leasable(state: LedgerState, held: Version) -> bool:
    """For a worker that holds version `held`."""
    if not state.pending:
        return False
    ordinal = state.pending[0]
    rank, limit = state.ranks.rank(ordinal), state.admitted_below(held)
    if state.items[ordinal].min_version > held or (limit is not None and rank >= limit):
        return False
    return not _beyond_lead(state, rank) and (_waited_for(state, rank) or _has_room(state))


def _beyond_lead(state: LedgerState, rank: int) -> bool:
    if state.lead is None:
        return False
    return rank >= state.trained_by(state.version + state.repeated) + state.lead.groups


def _waited_for(state: LedgerState, rank: int) -> bool:
    """Inside the window. A synchronous learner may wait for a whole batch at once."""
    settings = state.settings
    assert settings is not None
    waited_for = settings.groups_per_version if settings.max_staleness == 0 else settings.window or 1
    return rank < state.ranks.rank(state.head) + waited_for


def _has_room(state: LedgerState) -> bool:
    assert state.settings is not None
    if state.in_stock >= state.settings.depth:
        return False
    return state.nbytes + state.reserved + state.sizes.whole <= state.settings.max_bytes
