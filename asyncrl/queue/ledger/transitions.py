"""The change of the state by each event. Rewinds and restarts are in rewind.py."""

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


def apply(state: LedgerState, event: Event) -> None:
    if state.unmade or state.gone:
        state.unmade, state.gone = [], []
    EFFECTS[type(event)](state, event)


# ---------------------------------------------------------------------- opening and ending


def _opened(state: LedgerState, e: ev.StreamOpened) -> None:
    state.open(e.settings, e.learner_epoch, e.opener)
    state.stages = Stages(e.settings.stages)


def _forked(state: LedgerState, e: ev.Forked) -> None:
    state.lineage = e.lineage
    state.retention.fork(e.lineage, state.version)
    state.return_leases()


def _drained(state: LedgerState, e: ev.Drained) -> None:
    state.draining = state.exhausted = True
    for ordinal in sorted(state.pending):
        state.end(ordinal, DRAINED)
    state.pending = []
    state.move_head()


def _finished(state: LedgerState, e: ev.Finished) -> None:
    state.closed = e.reason
    state.forget_steps(state.version)
    for ordinal in sorted(state.items):
        state.end(ordinal, END)
    state.pending, state.leased, state.partial = [], set(), set()
    state.ready, state.ready_tokens = [], 0
    state.leases, state.stages = Leases(), Stages()
    state.claims, state.claimed, state.replay = [], 0, {}
    state.move_head()


# ---------------------------------------------------------------------- tasks


def _submitted(state: LedgerState, e: ev.Submitted) -> None:
    state.next = e.first + e.tasks
    for ordinal in range(e.first, state.next):
        if not state.ranks.ended(ordinal):
            state.items[ordinal] = TaskRecord(State.PENDING, e.min_version)
            heapq.heappush(state.pending, ordinal)
    state.move_head()


def _exhausted(state: LedgerState, e: ev.Exhausted) -> None:
    state.exhausted = True


def _leased(state: LedgerState, e: ev.Leased) -> None:
    heapq.heappop(state.pending)
    item = state.items[e.ordinal]
    item.state, item.epoch = State.LEASED, state.granted(e.grant)
    # With what others have finished come the versions that they held.
    item.held = min(item.held, e.held) if item.progress else e.held
    state.leased.add(e.ordinal)
    state.leases.grant(Lease(e.ordinal, TASK, e.worker, item.epoch, e.at, e.deadline))


def _renewed(state: LedgerState, e: ev.Renewed) -> None:
    state.leases.renew(e.epochs, e.deadline)


def _requeued(state: LedgerState, e: ev.Requeued) -> None:
    if e.why == "stale":
        state.forget_progress(e.ordinal)
    state.to_pending(e.ordinal)
    state.move_head()


def _progressed(state: LedgerState, e: ev.Progressed) -> None:
    item = state.items[e.ordinal]
    item.progress = e.nbytes > 0
    state.weigh(item, e.nbytes)


def _committed(state: LedgerState, e: ev.Committed) -> None:
    item = state.items[e.ordinal]
    state.end_task_lease(e.ordinal, item)
    item.tokens, item.squares = e.tokens, e.squares
    item.start_version, item.digest = e.start_version, e.digest
    item.progress, item.columns = False, frozenset(e.columns)
    state.weigh(item, e.nbytes)
    state.enter_ready(e.ordinal, item)
    state.sizes.note(TASK, e.nbytes)
    state.bias.finished(e.tokens)


def _dropped(state: LedgerState, e: ev.Dropped) -> None:
    item = state.items[e.ordinal]
    if item.state is State.LEASED:
        state.end_task_lease(e.ordinal, item)
        state.bias.lost()
    else:
        state.leave_ready(e.ordinal, item)
    state.end(e.ordinal, e.reason)
    state.move_head()


# ---------------------------------------------------------------------- stages


def _stage_leased(state: LedgerState, e: ev.StageLeased) -> None:
    epoch = state.granted(e.grant)
    state.items[e.ordinal].staging[e.stage] = epoch
    state.stages.waiting[e.stage].discard(e.ordinal)
    state.leases.grant(Lease(e.ordinal, e.stage, e.worker, epoch, e.at, e.deadline))


def _stage_returned(state: LedgerState, e: ev.StageReturned) -> None:
    state.end_stage_lease(e.ordinal, e.stage)


def _stage_committed(state: LedgerState, e: ev.StageCommitted) -> None:
    item = state.items[e.ordinal]
    epoch = item.staging.pop(e.stage)
    state.leases.end(epoch)
    state.remove_ready(e.ordinal, item)
    item.columns |= frozenset(state.stages.by_name[e.stage].adds)
    item.added[e.stage] = Column(epoch, e.digest, e.version)
    state.weigh(item, item.nbytes + e.nbytes)
    state.enter_ready(e.ordinal, item)
    state.sizes.note(e.stage, e.nbytes)


# ---------------------------------------------------------------------- the learner


def _step_claimed(state: LedgerState, e: ev.StepClaimed) -> None:
    state.claims.append(e)
    for share in e.shares:
        state.claimed += len(share)
        for ordinal in share:
            item = state.items[ordinal]
            if item.state is State.RECORDED:
                state.count_again(item)
            else:
                state.leave_ready(ordinal, item)
            item.state = State.CLAIMED
    state.move_head()


def _step_trained(state: LedgerState, e: ev.StepTrained) -> None:
    step = RetainedStep(state.claims, whole=True, before=state.published[state.version])
    for ordinal in step.ordinals():
        step.items[ordinal] = state.take_trained(ordinal)
    state.retention.steps[e.step] = step
    state.replay.pop(e.step, None)
    state.claims, state.claimed, state.version = [], 0, e.step + 1
    state.published[state.version] = state.ranks.trained_total
    # F(v) admits ranks below it, and no pending rank is below the frontier's.
    state.published = {
        v: groups for v, groups in state.published.items() if groups > state.ranks.kept or v == state.version
    }
    lost = any(item.lost for item in step.items.values())
    if lost or (state.settings is not None and not state.settings.retain):
        state.forget_steps(state.version)
    state.move_head()


def _step_rejected(state: LedgerState, e: ev.StepRejected) -> None:
    for ordinal in rewind.unclaim(state):
        if state.items[ordinal].state is State.CLAIMED:
            state.end(ordinal, e.reason)
        else:
            rewind.restock(state, ordinal)
    state.move_head()


def _step_abandoned(state: LedgerState, e: ev.StepAbandoned) -> None:
    for ordinal in rewind.unclaim(state):
        if ordinal in e.dropped:
            state.end(ordinal, e.reason)
        else:
            rewind.restock(state, ordinal)
    state.move_head()


def _checkpointed(state: LedgerState, e: ev.Checkpointed) -> None:
    state.forget_steps(e.version)


def _lead_set(state: LedgerState, e: ev.LeadSet) -> None:
    state.lead = e.lead


def _collected(state: LedgerState, e: ev.Collected) -> None:
    for ordinal in e.ordinals:
        state.leave_ready(ordinal, state.items[ordinal])
        state.bias.trained(state.items[ordinal].tokens)
        state.end(ordinal, None)
    state.move_head()


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
