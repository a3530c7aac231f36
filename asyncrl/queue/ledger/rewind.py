"""What a rewind, a step begun anew and a restart of the broker do to the book.

    step_back     the steps since a checkpoint are recorded: each will be claimed again as it was
    reset         nothing of them is kept: their tasks are done again
    unclaim       the running step is taken apart, and with it what is recorded for later, which has not happened now
    restock       a group that was claimed or recorded: ready again if the bound still lets it be, else its task is done
                  again
    unrecord      what is recorded for later steps has not happened now; the running one goes on
    recover       bytes of some groups are lost: these are made again, except that a learner which has got its groups
                  may go on with them

Tokens of an abandoned branch count as made by the version that the branch left from, at best: a group that stays ready
must be admitted under min(held, that version). Recorded steps repeat a history whose groups were admitted in it.
"""

from __future__ import annotations

from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.ledger_state import LedgerState
from asyncrl.queue.ledger.rules.ordinal_index import OrdinalIndex
from asyncrl.queue.ledger.rules.retained_steps import RetainedStep
from asyncrl.queue.ledger.settings import Frontier
from asyncrl.queue.ledger.task_record import State
from asyncrl.types import Version


def reset(book: LedgerState, e: ev.Rewound) -> None:
    book.forget_steps(book.version)
    book.gone += book.items
    book.settings = e.settings
    book.reset(e.frontier, e.lineage)
    book.open(e.settings, e.learner_epoch, e.opener)


def step_back(book: LedgerState, e: ev.SteppedBack) -> None:
    at = e.frontier.version
    book.open(e.settings, e.learner_epoch, e.opener)
    book.replay = _recorded(book, book.retention.fork(e.lineage, at))
    _take_back(book, e.frontier)
    book.lineage, book.version = e.lineage, at
    book.published = dict(e.frontier.published)
    book.return_leases()
    _count_as(book, at)


def unclaim(book: LedgerState) -> list[int]:
    """The running step begins anew. Returns what was claimed for it, or recorded for it and later steps."""
    ordinals = {ordinal for claim in book.claims for share in claim.shares for ordinal in share}
    for step in book.replay.values():
        ordinals.update(step.ordinals())
    book.claims, book.claimed, book.replay = [], 0, {}
    book.attempt += 1
    book.head = min([book.head, *ordinals])
    return sorted(ordinals)


def unrecord(book: LedgerState) -> list[int]:
    later = [step for version, step in book.replay.items() if version != book.version]
    ordinals = sorted(ordinal for step in later for ordinal in step.ordinals())
    book.replay = {version: step for version, step in book.replay.items() if version == book.version}
    book.head = min([book.head, *ordinals])
    return ordinals


def restock(book: LedgerState, ordinal: int) -> None:
    item = book.items[ordinal]
    if item.state is State.RECORDED:
        book.count_again(item)
    if item.lost or not _admitted(book, ordinal):
        book.unmake(ordinal)
    else:
        book.enter_ready(ordinal, item)


def recover(book: LedgerState, e: ev.Recovered) -> None:
    lost = set(e.lost)
    book.leases.renew_all(e.at, e.deadline)
    book.forget_steps(
        1 + max((v for v, s in book.retention.steps.items() if lost & s.items.keys()), default=-1)
    )
    live = [ordinal for ordinal in e.lost if ordinal in book.items]
    recorded = any(book.items[ordinal].state is State.RECORDED for ordinal in live)
    for ordinal in live:
        item = book.items[ordinal]
        if item.state is State.READY:
            book.leave_ready(ordinal, item)
            book.unmake(ordinal)
        elif item.state in (State.CLAIMED, State.RECORDED):
            item.lost = True
        else:
            book.forget_progress(ordinal)
    if recorded:
        whole = bool(book.claims) and book.claims[-1].last
        for ordinal in unrecord(book) if whole else unclaim(book):
            restock(book, ordinal)
    book.move_head()


# ---------------------------------------------------------------------- stepping back


def _recorded(book: LedgerState, trained: dict[Version, RetainedStep]) -> dict[Version, RetainedStep]:
    """The steps to be repeated: those trained since, what was being repeated, and the running one so far."""
    steps = {**trained, **book.replay}
    known = steps.get(book.version)
    if book.claims and (known is None or len(known.claims) < len(book.claims)):
        steps[book.version] = RetainedStep(book.claims, whole=book.claims[-1].last)
    return steps


def _take_back(book: LedgerState, frontier: Frontier) -> None:
    """Their groups have not ended any more; all else that has ended since was dropped, and stays so."""
    again = {ordinal: item for step in book.replay.values() for ordinal, item in step.items.items()}
    trained = again.keys() | set(frontier.trained)
    passed = range(frontier.frontier, book.ranks.frontier)
    dropped = [ordinal for ordinal in passed if ordinal not in trained] + book.ranks.dropped
    book.ranks = OrdinalIndex(frontier.frontier, frontier.kept, frontier.trained)
    for ordinal in dropped:
        book.ranks.drop(ordinal)
    for item in again.values():
        book.bias.trained(item.tokens, -1)
    for step in book.replay.values():
        step.items = {}
    book.items.update(again)
    for claim in book.claims:
        for share in claim.shares:
            for ordinal in share:
                again[ordinal] = book.items[ordinal]
                book.nbytes -= again[ordinal].nbytes
                book.kept_bytes += again[ordinal].nbytes
    for item in again.values():
        item.state = State.RECORDED
    book.recorded += len(again)
    book.claims, book.claimed = [], 0


def _count_as(book: LedgerState, version: Version) -> None:
    """No token is of a newer version than that from which the branch was left."""
    for ordinal, item in sorted(book.items.items()):
        item.held = min(item.held, version)
        if item.state is State.READY and not _admitted(book, ordinal):
            book.leave_ready(ordinal, item)
            book.unmake(ordinal)
        elif item.state is State.PENDING and not _admitted(book, ordinal):
            book.forget_progress(ordinal)
    book.move_head()


def _admitted(book: LedgerState, ordinal: int) -> bool:
    """Whether a worker that holds what the group was made under may start it now."""
    limit = book.admitted_below(book.items[ordinal].held)
    return limit is None or book.ranks.rank(ordinal) < limit
