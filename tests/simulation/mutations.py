"""Rules of the queue, broken on purpose: a simulation that does not find them out proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace as replaced

from asyncrl.queue.broker.recovery import Recovery
from asyncrl.queue.broker.stream import Stream
from asyncrl.queue.client import session
from asyncrl.queue.ledger import admission, claims, generator_commands, rewind
from asyncrl.queue.ledger.ledger import Ledger
from asyncrl.queue.ledger.state.leases import Leases
from asyncrl.queue.ledger.state.ledger_state import LedgerState
from asyncrl.queue.protocol.requests import CommitRequest
from asyncrl.queue.storage.records import encode_record

Mutation = Callable[[], Any]
"""Makes a context in which the rule is broken."""


def bound_off_by_one() -> Any:
    right = admission.admitted_below

    def wrong(state: LedgerState, held: int) -> int | None:
        limit = right(state, held)
        return None if limit is None else limit + 1

    return patch.object(admission, "admitted_below", wrong)


def window_off_by_one() -> Any:
    right = claims.ready_in_window

    def wrong(state: LedgerState, most: int) -> list[int]:
        before, settings = state.settings, state.settings
        if settings is None or settings.window is None:
            return right(state, most)
        # Past the checks of the settings: S is not to change.
        state.settings = _widened(settings)
        try:
            return right(state, most)
        finally:
            state.settings = before

    return patch.object(claims, "ready_in_window", wrong)


def _widened(settings: Any) -> Any:
    return replace(settings, window=settings.window + 1, max_staleness=99, depth=99)


def replies_before_the_flush() -> Any:
    """What was decided is written down with the next burst."""
    right, due = Recovery.flush, set[int]()

    def wrong(recovery: Recovery) -> None:
        if id(recovery) in due:
            right(recovery)
        due.symmetric_difference_update({id(recovery)})

    return patch.object(Recovery, "flush", wrong)


def no_fencing_of_workers() -> Any:
    right = generator_commands.commit

    def wrong(ledger: Ledger, request: CommitRequest) -> bool:
        item = ledger.state.tasks.records.get(request.ordinal)
        return right(ledger, request if item is None else replaced(request, epoch=item.epoch))

    return patch.object(generator_commands, "commit", wrong)


def abandoned_branches_count_as_fresh() -> Any:
    def wrong(state: LedgerState, version: int) -> None:
        state.tasks.move_head()

    return patch.object(rewind, "_count_as", wrong)


def leases_that_never_end() -> Any:
    return patch.object(generator_commands, "expire", lambda ledger, now: [])


def leases_of_the_clock_before() -> Any:
    return patch.object(Leases, "renew_all", lambda leases, at, deadline: None)


def lost_groups_are_handed_out() -> Any:
    return patch.object(Ledger, "has_lost", lambda ledger, ordinals: False)


def progress_is_forgotten() -> Any:
    return patch.object(Stream, "progress_of", lambda stream, ordinal: ())


def payloads_are_kept_after_the_journal() -> Any:
    def wrong(recovery: Recovery) -> None:
        recovery._journal.flush()
        recovery._store.tidy()
        recovery._store.flush()
        if recovery._journal.overgrown:
            recovery._journal.compact(encode_record(record) for record in recovery._snapshot())

    return patch.object(Recovery, "flush", wrong)


def grants_that_nobody_takes() -> Any:
    return patch.object(session.Session, "undo", lambda *_: None)


@contextmanager
def nothing_is_sent_again() -> Iterator[None]:
    with (
        patch.object(session, "RESEND_S", 1e9),
        patch.object(session.Session, "reconnected", lambda self, now: None),
    ):
        yield


MUTATIONS: dict[str, Mutation] = {
    mutation.__name__: mutation
    for mutation in (
        bound_off_by_one,
        window_off_by_one,
        replies_before_the_flush,
        no_fencing_of_workers,
        abandoned_branches_count_as_fresh,
        leases_that_never_end,
        leases_of_the_clock_before,
        lost_groups_are_handed_out,
        progress_is_forgotten,
        payloads_are_kept_after_the_journal,
        grants_that_nobody_takes,
        nothing_is_sent_again,
    )
}
