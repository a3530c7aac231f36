"""The changes of the state by a rewind, by a step that begins anew, and by a restart of the broker.

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
from asyncrl.queue.ledger.task_record import State
from asyncrl.queue.protocol.settings import Frontier
from asyncrl.types import Version


def reset(state: LedgerState, e: ev.Rewound) -> None:
    state.forget_steps(state.version)
    state.gone += state.items
    state.settings = e.settings
    state.reset(e.frontier, e.lineage)
    state.open(e.settings, e.learner_epoch, e.opener)


def step_back(state: LedgerState, e: ev.SteppedBack) -> None:
    at = e.frontier.version
    state.open(e.settings, e.learner_epoch, e.opener)
    state.replay = _recorded(state, state.retention.fork(e.lineage, at))
    _take_back(state, e.frontier)
    state.lineage, state.version = e.lineage, at
    state.published = dict(e.frontier.published)
    state.return_leases()
    _count_as(state, at)


def unclaim(state: LedgerState) -> list[int]:
    """The running step begins anew. Returns what was claimed for it, or recorded for it and later steps."""
    ordinals = {ordinal for claim in state.claims for share in claim.shares for ordinal in share}
    for step in state.replay.values():
        ordinals.update(step.ordinals())
    state.claims, state.claimed, state.replay = [], 0, {}
    state.attempt += 1
    state.head = min([state.head, *ordinals])
    return sorted(ordinals)


def unrecord(state: LedgerState) -> list[int]:
    later = [step for version, step in state.replay.items() if version != state.version]
    ordinals = sorted(ordinal for step in later for ordinal in step.ordinals())
    state.replay = {version: step for version, step in state.replay.items() if version == state.version}
    state.head = min([state.head, *ordinals])
    return ordinals


def restock(state: LedgerState, ordinal: int) -> None:
    item = state.items[ordinal]
    if item.state is State.RECORDED:
        state.count_again(item)
    if item.lost or not _admitted(state, ordinal):
        state.unmake(ordinal)
    else:
        state.enter_ready(ordinal, item)


def recover(state: LedgerState, e: ev.Recovered) -> None:
    lost = set(e.lost)
    state.leases.renew_all(e.at, e.deadline)
    state.forget_steps(
        1 + max((v for v, s in state.retention.steps.items() if lost & s.items.keys()), default=-1)
    )
    live = [ordinal for ordinal in e.lost if ordinal in state.items]
    recorded = any(state.items[ordinal].state is State.RECORDED for ordinal in live)
    for ordinal in live:
        item = state.items[ordinal]
        if item.state is State.READY:
            state.leave_ready(ordinal, item)
            state.unmake(ordinal)
        elif item.state in (State.CLAIMED, State.RECORDED):
            item.lost = True
        else:
            state.forget_progress(ordinal)
    if recorded:
        whole = bool(state.claims) and state.claims[-1].last
        for ordinal in unrecord(state) if whole else unclaim(state):
            restock(state, ordinal)
    state.move_head()


# ---------------------------------------------------------------------- stepping back


def _recorded(state: LedgerState, trained: dict[Version, RetainedStep]) -> dict[Version, RetainedStep]:
    """The steps to be repeated: those trained since, what was being repeated, and the running one so far."""
    steps = {**trained, **state.replay}
    known = steps.get(state.version)
    if state.claims and (known is None or len(known.claims) < len(state.claims)):
        steps[state.version] = RetainedStep(state.claims, whole=state.claims[-1].last)
    return steps


def _take_back(state: LedgerState, frontier: Frontier) -> None:
    """Their groups have not ended any more; all else that has ended since was dropped, and stays so."""
    again = {ordinal: item for step in state.replay.values() for ordinal, item in step.items.items()}
    trained = again.keys() | set(frontier.trained)
    passed = range(frontier.frontier, state.ranks.frontier)
    dropped = [ordinal for ordinal in passed if ordinal not in trained] + state.ranks.dropped
    state.ranks = OrdinalIndex(frontier.frontier, frontier.kept, frontier.trained)
    for ordinal in dropped:
        state.ranks.drop(ordinal)
    for item in again.values():
        state.bias.trained(item.tokens, -1)
    for step in state.replay.values():
        step.items = {}
    state.items.update(again)
    for claim in state.claims:
        for share in claim.shares:
            for ordinal in share:
                again[ordinal] = state.items[ordinal]
                state.nbytes -= again[ordinal].nbytes
                state.kept_bytes += again[ordinal].nbytes
    for item in again.values():
        item.state = State.RECORDED
    state.recorded += len(again)
    state.claims, state.claimed = [], 0


def _count_as(state: LedgerState, version: Version) -> None:
    """No token is of a newer version than that from which the branch was left."""
    for ordinal, item in sorted(state.items.items()):
        item.held = min(item.held, version)
        if item.state is State.READY and not _admitted(state, ordinal):
            state.leave_ready(ordinal, item)
            state.unmake(ordinal)
        elif item.state is State.PENDING and not _admitted(state, ordinal):
            state.forget_progress(ordinal)
    state.move_head()


def _admitted(state: LedgerState, ordinal: int) -> bool:
    """Whether a worker that holds what the group was made under may start it now."""
    limit = state.admitted_below(state.items[ordinal].held)
    return limit is None or state.ranks.rank(ordinal) < limit
