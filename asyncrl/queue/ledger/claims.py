"""The groups that each learner rank gets with the next claim of a step: by their cost, within the limit of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from asyncrl.errors import RefusedError
from asyncrl.queue.ledger.events import ClaimedAhead, StepClaimed
from asyncrl.queue.ledger.state.ledger_state import LedgerState

Shares = tuple[tuple[int, ...], ...]


def next_claim(state: LedgerState, max_tokens: int, whole: bool) -> StepClaimed | None:
    """The running step's next claim: as it was recorded, or of what is ready. None: not yet.

    whole=False takes the groups that are ready inside the window; whole=True the longest run of ready groups in ordinal
    order, once no group can be added to it. RefusedError 'complete': all groups of the step are handed out;
    'exhausted': there will be none.
    """
    steps, index = state.steps, len(state.steps.claims)
    recorded = steps.replay.get(steps.version)
    if recorded is not None and index < len(recorded.claims):
        return recorded.claims[index]
    if steps.replayed or steps.complete:
        raise RefusedError("complete", f"all {steps.claimed} groups of step {steps.version} are handed out")
    shares = _shares(state, max_tokens, whole)
    return None if shares is None else StepClaimed(steps.version, index, shares, _completes(state, shares))


def claim_ahead(state: LedgerState, max_tokens: int) -> ClaimedAhead | None:
    """The first claim of the step after the running one, whose groups are all handed out. None: not yet, or only when
    that step runs: while a group could still be added to it, or the stream ends."""
    settings, tasks, steps = state.settings, state.tasks, state.steps
    assert settings is not None
    groups = settings.groups_per_version
    if not steps.complete or state.exhausted:
        return None
    if len(tasks.ready) < groups and tasks.ready_tokens <= max_tokens * settings.learners:
        return None  # it can still grow, without looking at every group
    shares = _shared_out(state, ready_in_window(state, groups), groups, max_tokens, growing=False)
    if shares is None:
        return None
    return ClaimedAhead(steps.version + 1, shares, last=sum(map(len, shares)) == groups)


def _shares(state: LedgerState, max_tokens: int, whole: bool) -> Shares | None:
    settings, tasks, claimed = state.settings, state.tasks, state.steps.claimed
    assert settings is not None
    if state.exhausted and state.dry:
        if not claimed:
            raise RefusedError("exhausted", f"there are no tasks for step {state.steps.version}")
        return ((),) * settings.learners  # tasks that the step still hoped for were dropped
    left = settings.groups_per_version - claimed
    if whole and len(tasks.ready) < left and tasks.ready_tokens <= max_tokens and not state.exhausted:
        return None  # it can still grow, without looking at every group
    ordinals = ready_prefix(state, left) if whole else ready_in_window(state, left)
    return _shared_out(state, ordinals, left, max_tokens, growing=not whole)


def _shared_out(
    state: LedgerState, ordinals: Sequence[int], left: int, max_tokens: int, growing: bool
) -> Shares | None:
    """Each rank's share of the first ones that fit. left: groups that the step lacks · growing: whether a claim may be
    made to which a group could still be added"""
    settings, tasks = state.settings, state.tasks
    assert settings is not None
    loads = (
        GroupCost(task.tokens, settings.cost(task.tokens, task.squares))
        for task in map(tasks.records.__getitem__, ordinals)
    )
    homes = share_out(loads, settings.learners, max_tokens)
    grows = not _nothing_beyond(state, len(ordinals)) and len(homes) == len(ordinals) < left
    if not homes or (grows and not growing):
        return None
    shares: list[list[int]] = [[] for _ in range(settings.learners)]
    for ordinal, home in zip(ordinals, homes, strict=False):
        shares[home].append(ordinal)
    return tuple(map(tuple, shares))


def _completes(state: LedgerState, shares: Shares) -> bool:
    """Whether a claim of these is the step's last."""
    assert state.settings is not None
    taken = sum(map(len, shares))
    return state.steps.claimed + taken == state.settings.groups_per_version or _nothing_beyond(state, taken)


def _nothing_beyond(state: LedgerState, ready: int) -> bool:
    """Whether no group will come but that many ready ones."""
    return state.exhausted and not state.tasks.to_come and len(state.tasks.ready) == ready


# ---------------------------------------------------------------------- the groups that may be taken


def ready_prefix(state: LedgerState, most: int) -> list[int]:
    """Ready ordinals in strict order from the head, up to the first that is not ready."""
    prefix: list[int] = []
    ordinal = state.tasks.head
    for ready in state.tasks.ready[:most]:
        if ready != ordinal:
            break
        prefix.append(ready)
        ordinal = state.tasks.unclaimed_from(ready + 1)
    return prefix


def ready_in_window(state: LedgerState, most: int) -> list[int]:
    """Ready ordinals that may be taken one after another; taking the head slides the window."""
    assert state.settings is not None
    tasks, window = state.tasks, state.settings.window
    if window is None:
        return tasks.ready[:most]
    taken: list[int] = []
    head = tasks.head
    for ordinal in tasks.ready[:most]:
        far = ordinal - head >= window  # only then to be counted without the dropped ones
        if far and tasks.ranks.rank(ordinal) >= tasks.ranks.rank(head) + window:
            break
        taken.append(ordinal)
        if ordinal == head:
            head = tasks.unclaimed_from(ordinal + 1)
    return taken


# ---------------------------------------------------------------------- their distribution over the ranks


class GroupCost(NamedTuple):
    """The load of one group on the rank that trains on it. cost: in any unit, alike for all groups."""

    tokens: int
    cost: float


def share_out(loads: Iterable[GroupCost], ranks: int, max_tokens: int) -> list[int]:
    """The rank of each group of the longest prefix that fits `max_tokens` tokens a rank.

    The prefix: each group in turn goes to the rank with the least cost so far (the lowest on ties); the first that
    does not fit there ends it. A group larger than `max_tokens` fits an empty rank, and fills it. Then the same groups
    are shared out dearest first, which levels them better (Graham 1969, the LPT rule: within 4/3 of the best), and the
    better of the two stays.

    >>> share_out([GroupCost(5, 5), GroupCost(3, 3), GroupCost(1, 1), GroupCost(9, 9)], ranks=2, max_tokens=8)
    [0, 1, 1]
    >>> share_out([GroupCost(n, n) for n in (1, 2, 2, 5)], ranks=2, max_tokens=8)
    [1, 1, 1, 0]
    """
    taken: list[GroupCost] = []
    homes: list[int] = []
    costs, tokens = [0.0] * ranks, [0] * ranks
    for load in loads:
        home = costs.index(min(costs))
        if tokens[home] and tokens[home] + load.tokens > max_tokens:
            break
        costs[home] += load.cost
        tokens[home] += load.tokens
        homes.append(home)
        taken.append(load)
    if ranks == 1:
        return homes
    levelled = _dearest_first(taken, ranks, max_tokens)
    if levelled is not None and dearest(taken, levelled, ranks) < max(costs):
        return levelled
    return homes


def dearest(loads: Sequence[GroupCost], homes: Sequence[int], ranks: int) -> float:
    """The cost of the rank that has most."""
    costs = [0.0] * ranks
    for load, home in zip(loads, homes, strict=True):
        costs[home] += load.cost
    return max(costs)


def _dearest_first(loads: Sequence[GroupCost], ranks: int, max_tokens: int) -> list[int] | None:
    """The ranks by descending cost, or None if the groups do not fit that way."""
    costs, tokens, homes = [0.0] * ranks, [0] * ranks, [0] * len(loads)
    for item in sorted(range(len(loads)), key=lambda item: -loads[item].cost):
        fits = [
            rank
            for rank in range(ranks)
            if not tokens[rank] or tokens[rank] + loads[item].tokens <= max_tokens
        ]
        if not fits:
            return None
        homes[item] = min(fits, key=costs.__getitem__)
        costs[homes[item]] += loads[item].cost
        tokens[homes[item]] += loads[item].tokens
    return homes
