"""Whether the lowest pending task may start: the staleness bound, the lead, and room for its bytes.

    the bound   rank(o) < F(held + S + 1): see ledger.py
    the lead    rank(o) < groups trained + lead: no further ahead of the learner than its waiting asks for
    room        `depth` groups leased or ready; `max_bytes` of payload, with what leased groups are expected to weigh

What the learner may be waiting for starts without room, or learner and generators would wait for each other.
"""

from __future__ import annotations

from asyncrl.queue.ledger.ledger_state import LedgerState
from asyncrl.types import Version


def leasable(book: LedgerState, held: Version) -> bool:
    """For a worker that holds version `held`."""
    if not book.pending:
        return False
    ordinal = book.pending[0]
    rank, limit = book.ranks.rank(ordinal), book.admitted_below(held)
    if book.items[ordinal].min_version > held or (limit is not None and rank >= limit):
        return False
    return not _beyond_lead(book, rank) and (_waited_for(book, rank) or _has_room(book))


def _beyond_lead(book: LedgerState, rank: int) -> bool:
    if book.lead is None:
        return False
    return rank >= book.trained_by(book.version + book.repeated) + book.lead.groups


def _waited_for(book: LedgerState, rank: int) -> bool:
    """Inside the window. A synchronous learner may wait for a whole batch at once."""
    settings = book.settings
    assert settings is not None
    waited_for = settings.groups_per_version if settings.max_staleness == 0 else settings.window or 1
    return rank < book.ranks.rank(book.head) + waited_for


def _has_room(book: LedgerState) -> bool:
    assert book.settings is not None
    if book.in_stock >= book.settings.depth:
        return False
    return book.nbytes + book.reserved + book.sizes.whole <= book.settings.max_bytes
