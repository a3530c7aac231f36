"""What each event does to the book. What rewinds and restarts do is in rewind.py."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger import rewind
from asyncrl.queue.ledger.events import Event
from asyncrl.queue.ledger.ledger_state import DRAINED, LedgerState
from asyncrl.queue.ledger.rules.leases import TASK, Lease, Leases
from asyncrl.queue.ledger.rules.retained_steps import RetainedStep
from asyncrl.queue.ledger.rules.stages import Stages
from asyncrl.queue.ledger.task_record import Column, State, TaskRecord

END = "end"
"""The reason of tasks that the end of the run cut off."""


def apply(book: LedgerState, event: Event) -> None:
    if book.unmade or book.gone:
        book.unmade, book.gone = [], []
    EFFECTS[type(event)](book, event)


# ---------------------------------------------------------------------- opening and ending


def _opened(book: LedgerState, e: ev.StreamOpened) -> None:
    book.open(e.settings, e.learner_epoch, e.opener)
    book.stages = Stages(e.settings.stages)


def _forked(book: LedgerState, e: ev.Forked) -> None:
    book.lineage = e.lineage
    book.retention.fork(e.lineage, book.version)
    book.return_leases()


def _drained(book: LedgerState, e: ev.Drained) -> None:
    book.draining = book.exhausted = True
    for ordinal in sorted(book.pending):
        book.end(ordinal, DRAINED)
    book.pending = []
    book.move_head()


def _finished(book: LedgerState, e: ev.Finished) -> None:
    book.closed = e.reason
    book.forget_steps(book.version)
    for ordinal in sorted(book.items):
        book.end(ordinal, END)
    book.pending, book.leased, book.partial = [], set(), set()
    book.ready, book.ready_tokens = [], 0
    book.leases, book.stages = Leases(), Stages()
    book.claims, book.claimed, book.replay = [], 0, {}
    book.move_head()


# ---------------------------------------------------------------------- tasks


def _submitted(book: LedgerState, e: ev.Submitted) -> None:
    book.next = e.first + e.tasks
    for ordinal in range(e.first, book.next):
        if not book.ranks.ended(ordinal):
            book.items[ordinal] = TaskRecord(State.PENDING, e.min_version)
            heapq.heappush(book.pending, ordinal)
    book.move_head()


def _exhausted(book: LedgerState, e: ev.Exhausted) -> None:
    book.exhausted = True


def _leased(book: LedgerState, e: ev.Leased) -> None:
    heapq.heappop(book.pending)
    item = book.items[e.ordinal]
    item.state, item.epoch = State.LEASED, book.granted(e.grant)
    # With what others have finished come the versions that they held.
    item.held = min(item.held, e.held) if item.progress else e.held
    book.leased.add(e.ordinal)
    book.leases.grant(Lease(e.ordinal, TASK, e.worker, item.epoch, e.at, e.deadline))


def _renewed(book: LedgerState, e: ev.Renewed) -> None:
    book.leases.renew(e.epochs, e.deadline)


def _requeued(book: LedgerState, e: ev.Requeued) -> None:
    if e.why == "stale":
        book.forget_progress(e.ordinal)
    book.to_pending(e.ordinal)
    book.move_head()


def _progressed(book: LedgerState, e: ev.Progressed) -> None:
    item = book.items[e.ordinal]
    item.progress = e.nbytes > 0
    book.weigh(item, e.nbytes)


def _committed(book: LedgerState, e: ev.Committed) -> None:
    item = book.items[e.ordinal]
    book.end_task_lease(e.ordinal, item)
    item.tokens, item.squares = e.tokens, e.squares
    item.start_version, item.digest = e.start_version, e.digest
    item.progress, item.columns = False, frozenset(e.columns)
    book.weigh(item, e.nbytes)
    book.enter_ready(e.ordinal, item)
    book.sizes.note(TASK, e.nbytes)
    book.bias.finished(e.tokens)


def _dropped(book: LedgerState, e: ev.Dropped) -> None:
    item = book.items[e.ordinal]
    if item.state is State.LEASED:
        book.end_task_lease(e.ordinal, item)
        book.bias.lost()
    else:
        book.leave_ready(e.ordinal, item)
    book.end(e.ordinal, e.reason)
    book.move_head()


# ---------------------------------------------------------------------- stages


def _stage_leased(book: LedgerState, e: ev.StageLeased) -> None:
    epoch = book.granted(e.grant)
    book.items[e.ordinal].staging[e.stage] = epoch
    book.stages.waiting[e.stage].discard(e.ordinal)
    book.leases.grant(Lease(e.ordinal, e.stage, e.worker, epoch, e.at, e.deadline))


def _stage_returned(book: LedgerState, e: ev.StageReturned) -> None:
    book.end_stage_lease(e.ordinal, e.stage)


def _stage_committed(book: LedgerState, e: ev.StageCommitted) -> None:
    item = book.items[e.ordinal]
    epoch = item.staging.pop(e.stage)
    book.leases.end(epoch)
    book.remove_ready(e.ordinal, item)
    item.columns |= frozenset(book.stages.by_name[e.stage].adds)
    item.added[e.stage] = Column(epoch, e.digest, e.version)
    book.weigh(item, item.nbytes + e.nbytes)
    book.enter_ready(e.ordinal, item)
    book.sizes.note(e.stage, e.nbytes)


# ---------------------------------------------------------------------- the learner


def _step_claimed(book: LedgerState, e: ev.StepClaimed) -> None:
    book.claims.append(e)
    for share in e.shares:
        book.claimed += len(share)
        for ordinal in share:
            item = book.items[ordinal]
            if item.state is State.RECORDED:
                book.count_again(item)
            else:
                book.leave_ready(ordinal, item)
            item.state = State.CLAIMED
    book.move_head()


def _step_trained(book: LedgerState, e: ev.StepTrained) -> None:
    step = RetainedStep(book.claims, whole=True, before=book.published[book.version])
    for ordinal in step.ordinals():
        step.items[ordinal] = book.take_trained(ordinal)
    book.retention.steps[e.step] = step
    book.replay.pop(e.step, None)
    book.claims, book.claimed, book.version = [], 0, e.step + 1
    book.published[book.version] = book.ranks.trained_total
    # F(v) admits ranks below it, and no pending rank is below the frontier's.
    book.published = {
        v: groups for v, groups in book.published.items() if groups > book.ranks.kept or v == book.version
    }
    lost = any(item.lost for item in step.items.values())
    if lost or (book.settings is not None and not book.settings.retain):
        book.forget_steps(book.version)
    book.move_head()


def _step_rejected(book: LedgerState, e: ev.StepRejected) -> None:
    for ordinal in rewind.unclaim(book):
        if book.items[ordinal].state is State.CLAIMED:
            book.end(ordinal, e.reason)
        else:
            rewind.restock(book, ordinal)
    book.move_head()


def _step_abandoned(book: LedgerState, e: ev.StepAbandoned) -> None:
    for ordinal in rewind.unclaim(book):
        if ordinal in e.dropped:
            book.end(ordinal, e.reason)
        else:
            rewind.restock(book, ordinal)
    book.move_head()


def _checkpointed(book: LedgerState, e: ev.Checkpointed) -> None:
    book.forget_steps(e.version)


def _lead_set(book: LedgerState, e: ev.LeadSet) -> None:
    book.lead = e.lead


def _collected(book: LedgerState, e: ev.Collected) -> None:
    for ordinal in e.ordinals:
        book.leave_ready(ordinal, book.items[ordinal])
        book.bias.trained(book.items[ordinal].tokens)
        book.end(ordinal, None)
    book.move_head()


EFFECTS: dict[type, Callable[[LedgerState, Any], None]] = {
    ev.StreamOpened: _opened,
    ev.Rewound: rewind.reset,
    ev.SteppedBack: rewind.step_back,
    ev.Forked: _forked,
    ev.Recovered: rewind.recover,
    ev.Drained: _drained,
    ev.Finished: _finished,
    ev.Submitted: _submitted,
    ev.Exhausted: _exhausted,
    ev.Leased: _leased,
    ev.Renewed: _renewed,
    ev.Requeued: _requeued,
    ev.Progressed: _progressed,
    ev.Committed: _committed,
    ev.Dropped: _dropped,
    ev.StageLeased: _stage_leased,
    ev.StageReturned: _stage_returned,
    ev.StageCommitted: _stage_committed,
    ev.StepClaimed: _step_claimed,
    ev.StepTrained: _step_trained,
    ev.StepRejected: _step_rejected,
    ev.StepAbandoned: _step_abandoned,
    ev.Checkpointed: _checkpointed,
    ev.LeadSet: _lead_set,
    ev.Collected: _collected,
}
