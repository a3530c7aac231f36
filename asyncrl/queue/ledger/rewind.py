"""The changes of the state by a rewind, by a step that begins anew, and by a restart of the broker.

    step_back     the steps since a checkpoint are recorded: each will be claimed again as it was
    reset         nothing of them is kept: their tasks are done again
    unclaim       the running step is taken apart, and with it what is recorded for later, which has not happened now
    restock       a group that was claimed, ahead or recorded: ready again if the bound still lets it be, else its task
                  is done again
    unrecord      what is recorded for later steps has not happened now; the running one goes on
    recover       bytes of some groups are lost: these are made again, except that a learner which has got its groups
                  may go on with them

After a rewind to version v, tokens of newer versions count as tokens of version v: a group stays ready only if it is
admitted under min(held, v). Recorded steps repeat a history whose groups were admitted in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.admission import admitted_below
from asyncrl.queue.ledger.state.leases import Leases
from asyncrl.queue.ledger.state.ledger_state import LedgerState
from asyncrl.queue.ledger.state.sizes import ByteUsage, LengthBias
from asyncrl.queue.ledger.state.stages import Stages
from asyncrl.queue.ledger.state.steps import RetainedStep, RetainedSteps, Steps
from asyncrl.queue.ledger.state.tasks import TAKEN, OrdinalIndex, State, Tasks
from asyncrl.queue.protocol.settings import Frontier
from asyncrl.types import Version


def reset(state: LedgerState, e: ev.Rewound) -> None:
    """Forget all tasks; those in the frontier have ended."""
    state.forget_steps(state.steps.version)
    at = e.frontier.version
    state.usage = ByteUsage(gone=[*state.usage.gone, *state.tasks.records])
    state.lineage, state.exhausted = e.lineage, state.draining
    state.tasks, state.leases = Tasks.after(e.frontier), Leases(grants=e.frontier.grants)
    state.steps = Steps(
        version=at,
        published=dict(e.frontier.published),
        attempt=state.steps.attempt,
        retained=RetainedSteps(at, forks={e.lineage: at}),
    )
    state.stages, state.bias = Stages.of(e.settings.stages), LengthBias()
    state.open(e.settings, e.learner_epoch, e.opener)


def step_back(state: LedgerState, e: ev.SteppedBack) -> None:
    steps, at = state.steps, e.frontier.version
    state.open(e.settings, e.learner_epoch, e.opener)
    ahead = state.ahead
    steps.replay = _recorded(steps, steps.retained.fork(e.lineage, at))
    _take_back(state, e.frontier, ahead)
    state.lineage, steps.version = e.lineage, at
    steps.published = dict(e.frontier.published)
    state.return_leases()
    _count_as(state, at)


def unclaim(state: LedgerState) -> list[int]:
    """The running step begins anew. Returns what was claimed for it, or recorded for it and later steps."""
    steps = state.steps
    ordinals = steps.claimed_ordinals()
    for step in steps.replay.values():
        ordinals.update(step.ordinals())
    steps.take_claims()
    steps.replay = {}
    steps.attempt += 1
    state.tasks.head = min([state.tasks.head, *ordinals])
    return sorted(ordinals)


def unrecord(state: LedgerState) -> list[int]:
    steps = state.steps
    later = [step for version, step in steps.replay.items() if version != steps.version]
    ordinals = sorted(ordinal for step in later for ordinal in step.ordinals())
    steps.replay = {version: step for version, step in steps.replay.items() if version == steps.version}
    state.tasks.head = min([state.tasks.head, *ordinals])
    return ordinals


def restock(state: LedgerState, ordinal: int) -> None:
    task = state.tasks.records[ordinal]
    if task.state is State.RECORDED:
        state.use_again(task)
    if task.lost or not _admitted(state, ordinal):
        state.unmake(ordinal)
    else:
        state.enter_ready(ordinal, task)


def recover(state: LedgerState, e: ev.Recovered) -> None:
    lost, records = set(e.lost), state.tasks.records
    state.leases.renew_all(e.at, e.deadline)
    retained = state.steps.retained.steps
    state.forget_steps(1 + max((v for v, step in retained.items() if lost & step.records.keys()), default=-1))
    live = [ordinal for ordinal in e.lost if ordinal in records]
    recorded = any(records[ordinal].state is State.RECORDED for ordinal in live)
    for ordinal in live:
        task = records[ordinal]
        if task.state is State.READY:
            state.leave_ready(ordinal, task)
            state.unmake(ordinal)
        elif task.state in TAKEN:
            task.lost = True
        else:
            state.forget_progress(ordinal)
    if recorded:
        for ordinal in unrecord(state) if state.steps.complete else unclaim(state):
            restock(state, ordinal)
    state.tasks.move_head()


# ---------------------------------------------------------------------- stepping back


def _recorded(steps: Steps, trained: dict[Version, RetainedStep]) -> dict[Version, RetainedStep]:
    """The steps to be repeated: those trained since, what was being repeated, and the running one so far."""
    replay = {**trained, **steps.replay}
    known = replay.get(steps.version)
    if steps.claims and (known is None or (not known.whole and len(known.claims) <= len(steps.claims))):
        replay[steps.version] = RetainedStep(steps.claims, whole=steps.complete)
    return replay


def _take_back(state: LedgerState, frontier: Frontier, ahead: Sequence[int]) -> None:
    """Their groups have not ended any more; all else that has ended since was dropped, and stays so. ahead: groups
    that were claimed ahead"""
    steps, tasks = state.steps, state.tasks
    again = {ordinal: task for step in steps.replay.values() for ordinal, task in step.records.items()}
    trained = again.keys() | set(frontier.trained)
    passed = range(frontier.frontier, tasks.ranks.frontier)
    dropped = [ordinal for ordinal in passed if ordinal not in trained] + tasks.ranks.dropped
    tasks.ranks = OrdinalIndex(frontier.frontier, frontier.kept, set(frontier.trained))
    for ordinal in dropped:
        tasks.ranks.drop(ordinal)
    for task in again.values():
        state.bias.trained(task.tokens, -1)
    for step in steps.replay.values():
        step.records = {}
    tasks.records.update(again)
    for ordinal in [*steps.claimed_ordinals(), *ahead]:
        task = again[ordinal] = tasks.records[ordinal]
        state.usage.retain(task.nbytes)
    for task in again.values():
        task.state = State.RECORDED
    steps.recorded += len(again)
    steps.take_claims()


def _count_as(state: LedgerState, version: Version) -> None:
    """No token is of a newer version than that from which the branch was left."""
    for ordinal, task in sorted(state.tasks.records.items()):
        task.held = min(task.held, version)
        if task.state is State.READY and not _admitted(state, ordinal):
            state.leave_ready(ordinal, task)
            state.unmake(ordinal)
        elif task.state is State.PENDING and not _admitted(state, ordinal):
            state.forget_progress(ordinal)
    state.tasks.move_head()


def _admitted(state: LedgerState, ordinal: int) -> bool:
    """Whether a worker that holds what the group was made under may start it now."""
    limit = admitted_below(state, state.tasks.records[ordinal].held)
    return limit is None or state.tasks.ranks.rank(ordinal) < limit
