"""The change of the state by each event. Rewinds and restarts are in rewind.py."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger import rewind
from asyncrl.queue.ledger.events import Event
from asyncrl.queue.ledger.state.leases import TASK, Leases
from asyncrl.queue.ledger.state.ledger_state import LedgerState
from asyncrl.queue.ledger.state.stages import Stages
from asyncrl.queue.ledger.state.steps import RetainedStep
from asyncrl.queue.ledger.state.tasks import DRAINED, END, Column, State, TaskRecord


def apply(state: LedgerState, event: Event) -> None:
    usage = state.usage
    if usage.unmade or usage.gone:
        usage.unmade, usage.gone = [], []
    EFFECTS[type(event)](state, event)


# ---------------------------------------------------------------------- opening and ending


def _opened(state: LedgerState, e: ev.StreamOpened) -> None:
    state.open(e.settings, e.learner_epoch, e.opener)
    state.stages = Stages.of(e.settings.stages)


def _forked(state: LedgerState, e: ev.Forked) -> None:
    state.lineage = e.lineage
    state.steps.retained.fork(e.lineage, state.steps.version)
    state.return_leases()


def _drained(state: LedgerState, e: ev.Drained) -> None:
    state.draining = state.exhausted = True
    for ordinal in sorted(state.tasks.pending):
        state.end(ordinal, DRAINED)
    state.tasks.pending = []
    state.tasks.move_head()


def _finished(state: LedgerState, e: ev.Finished) -> None:
    state.closed = e.reason
    state.forget_steps(state.steps.version)
    tasks = state.tasks
    for ordinal in sorted(tasks.records):
        state.end(ordinal, END)
    tasks.pending, tasks.leased, tasks.partial = [], set(), set()
    tasks.ready, tasks.ready_tokens = [], 0
    state.leases, state.stages = Leases(grants=state.leases.grants), Stages()
    state.steps.take_claims()
    state.steps.replay = {}
    tasks.move_head()


# ---------------------------------------------------------------------- tasks


def _submitted(state: LedgerState, e: ev.Submitted) -> None:
    tasks = state.tasks
    tasks.next = e.first + e.tasks
    for ordinal in range(e.first, tasks.next):
        if not tasks.ranks.ended(ordinal):
            tasks.records[ordinal] = TaskRecord(State.PENDING, e.min_version)
            heapq.heappush(tasks.pending, ordinal)
    tasks.move_head()


def _exhausted(state: LedgerState, e: ev.Exhausted) -> None:
    state.exhausted = True


def _leased(state: LedgerState, e: ev.Leased) -> None:
    tasks = state.tasks
    heapq.heappop(tasks.pending)
    task = tasks.records[e.ordinal]
    task.state, task.epoch = State.LEASED, state.grant(e, TASK)
    # With kept progress, `held` is the minimum over all leases that contributed to it.
    task.held = min(task.held, e.held) if task.progress else e.held
    tasks.leased.add(e.ordinal)


def _hedged(state: LedgerState, e: ev.Hedged) -> None:
    task = state.tasks.records[e.ordinal]
    state.leases.hedged[e.ordinal] = task.epoch
    task.epoch, task.held = state.grant(e, TASK), min(task.held, e.held)


def _hedge_ended(state: LedgerState, e: ev.HedgeEnded) -> None:
    task, earlier = state.tasks.records[e.ordinal], state.leases.hedged.pop(e.ordinal)
    state.leases.end(e.epoch)
    if e.epoch == task.epoch:
        task.epoch = earlier


def _renewed(state: LedgerState, e: ev.Renewed) -> None:
    state.leases.renew(e.epochs, e.deadline)


def _requeued(state: LedgerState, e: ev.Requeued) -> None:
    if e.why == "stale":
        state.forget_progress(e.ordinal)
    state.to_pending(e.ordinal, wanted=e.why in ("expired", "unreachable"))
    state.tasks.move_head()


def _progressed(state: LedgerState, e: ev.Progressed) -> None:
    task = state.tasks.records[e.ordinal]
    task.progress = e.nbytes > 0
    state.usage.weigh(task, e.nbytes)


def _committed(state: LedgerState, e: ev.Committed) -> None:
    task = state.tasks.records[e.ordinal]
    state.end_task_lease(e.ordinal, task)
    task.tokens, task.squares = e.tokens, e.squares
    task.start_version, task.digest = e.start_version, e.digest
    task.progress, task.columns = False, frozenset(e.columns)
    state.usage.weigh(task, e.nbytes)
    state.enter_ready(e.ordinal, task)
    state.usage.note(TASK, e.nbytes)
    state.bias.finished(e.tokens)


def _dropped(state: LedgerState, e: ev.Dropped) -> None:
    task = state.tasks.records[e.ordinal]
    if task.state is State.LEASED:
        state.end_task_lease(e.ordinal, task)
        state.bias.lost()
    else:
        state.leave_ready(e.ordinal, task)
    state.end(e.ordinal, e.reason)
    state.tasks.move_head()


# ---------------------------------------------------------------------- stages


def _stage_leased(state: LedgerState, e: ev.StageLeased) -> None:
    state.tasks.records[e.ordinal].staging[e.stage] = state.grant(e, e.stage)
    state.stages.withdraw(e.ordinal, e.stage)


def _stage_returned(state: LedgerState, e: ev.StageReturned) -> None:
    state.end_stage_lease(e.ordinal, e.stage)


def _stage_committed(state: LedgerState, e: ev.StageCommitted) -> None:
    task = state.tasks.records[e.ordinal]
    epoch = task.staging.pop(e.stage)
    state.leases.end(epoch)
    state.remove_ready(e.ordinal, task)
    task.columns |= frozenset(state.stages.by_name[e.stage].adds)
    task.added[e.stage] = Column(epoch, e.digest, e.version)
    state.usage.weigh(task, task.nbytes + e.nbytes)
    state.enter_ready(e.ordinal, task)
    state.usage.note(e.stage, e.nbytes)


# ---------------------------------------------------------------------- the learner


def _step_claimed(state: LedgerState, e: ev.StepClaimed) -> None:
    state.steps.claims.append(e)
    for share in e.shares:
        state.steps.claimed += len(share)
        for ordinal in share:
            task = state.tasks.records[ordinal]
            if task.state is State.RECORDED:
                state.use_again(task)
            elif task.state is State.READY:
                state.leave_ready(ordinal, task)
            task.state = State.CLAIMED
    state.tasks.move_head()


def _claimed_ahead(state: LedgerState, e: ev.ClaimedAhead) -> None:
    claim = ev.StepClaimed(e.step, 0, e.shares, e.last)
    state.steps.replay[e.step] = recorded = RetainedStep([claim], whole=False)
    for ordinal in recorded.ordinals():
        task = state.tasks.records[ordinal]
        state.leave_ready(ordinal, task)
        task.state = State.AHEAD
    state.tasks.move_head()


def _step_trained(state: LedgerState, e: ev.StepTrained) -> None:
    steps, tasks = state.steps, state.tasks
    step = RetainedStep(steps.take_claims(), whole=True, before=steps.published[steps.version])
    for ordinal in step.ordinals():
        task = step.records[ordinal] = tasks.end(ordinal, None)
        state.usage.retain(task.nbytes)
        state.bias.trained(task.tokens)
    steps.retained.steps[e.step] = step
    steps.replay.pop(e.step, None)
    steps.version = e.step + 1
    steps.published[steps.version] = tasks.ranks.trained_total
    # F(v) admits ranks below it, and no pending rank is below the frontier's.
    steps.published = {
        v: groups for v, groups in steps.published.items() if groups > tasks.ranks.kept or v == steps.version
    }
    lost = any(task.lost for task in step.records.values())
    if lost or (state.settings is not None and not state.settings.retain):
        state.forget_steps(steps.version)
    tasks.move_head()


def _step_rejected(state: LedgerState, e: ev.StepRejected) -> None:
    for ordinal in rewind.unclaim(state):
        if state.tasks.records[ordinal].state is State.CLAIMED:
            state.end(ordinal, e.reason)
        else:
            rewind.restock(state, ordinal)
    state.tasks.move_head()


def _step_abandoned(state: LedgerState, e: ev.StepAbandoned) -> None:
    for ordinal in rewind.unclaim(state):
        if ordinal in e.dropped:
            state.end(ordinal, e.reason)
        else:
            rewind.restock(state, ordinal)
    state.tasks.move_head()


def _checkpointed(state: LedgerState, e: ev.Checkpointed) -> None:
    state.forget_steps(e.version)


def _lead_set(state: LedgerState, e: ev.LeadSet) -> None:
    state.lead = e.lead


def _collected(state: LedgerState, e: ev.Collected) -> None:
    for ordinal in e.ordinals:
        task = state.tasks.records[ordinal]
        state.leave_ready(ordinal, task)
        state.bias.trained(task.tokens)
        state.end(ordinal, None)
    state.tasks.move_head()


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
    ev.Hedged: _hedged,
    ev.HedgeEnded: _hedge_ended,
    ev.Renewed: _renewed,
    ev.Requeued: _requeued,
    ev.Progressed: _progressed,
    ev.Committed: _committed,
    ev.Dropped: _dropped,
    ev.StageLeased: _stage_leased,
    ev.StageReturned: _stage_returned,
    ev.StageCommitted: _stage_committed,
    ev.StepClaimed: _step_claimed,
    ev.ClaimedAhead: _claimed_ahead,
    ev.StepTrained: _step_trained,
    ev.StepRejected: _step_rejected,
    ev.StepAbandoned: _step_abandoned,
    ev.Checkpointed: _checkpointed,
    ev.LeadSet: _lead_set,
    ev.Collected: _collected,
}
