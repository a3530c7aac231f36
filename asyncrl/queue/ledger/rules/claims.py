"""The groups that each learner rank gets with the next claim of a step."""

from __future__ import annotations

from asyncrl.errors import RefusedError
from asyncrl.queue.ledger.events import StepClaimed
from asyncrl.queue.ledger.ledger_state import LedgerState
from asyncrl.queue.ledger.rules.shares import GroupCost, share_out

Shares = tuple[tuple[int, ...], ...]


def next_claim(state: LedgerState, max_tokens: int, whole: bool) -> StepClaimed | None:
    """The running step's next claim: as it was recorded, or of what is ready. None: not yet.

    whole=False takes what is ready inside the window; whole=True the longest prefix in ordinal order, once it
    cannot grow. RefusedError 'complete': all groups of the step are handed out; 'exhausted': there will be none.
    """
    index = len(state.claims)
    recorded = state.recorded_claim(index)
    if recorded is not None:
        return recorded
    if state.replayed or (state.claims and state.claims[-1].last):
        raise RefusedError("complete", f"all {state.claimed} groups of step {state.version} are handed out")
    shares = _shares(state, max_tokens, whole)
    return None if shares is None else StepClaimed(state.version, index, shares, _completes(state, shares))


def _shares(state: LedgerState, max_tokens: int, whole: bool) -> Shares | None:
    settings = state.settings
    assert settings is not None
    if state.exhausted and state.dry:
        if not state.claimed:
            raise RefusedError("exhausted", f"there are no tasks for step {state.version}")
        return ((),) * settings.learners  # tasks that the step still hoped for were dropped
    left = settings.groups_per_version - state.claimed
    if whole and len(state.ready) < left and state.ready_tokens <= max_tokens and not state.exhausted:
        return None  # it can still grow, without looking at every group
    ordinals = state.ready_prefix(left) if whole else state.ready_in_window(left)
    loads = (
        GroupCost(item.tokens, settings.cost(item.tokens, item.squares))
        for item in map(state.items.__getitem__, ordinals)
    )
    homes = share_out(loads, settings.learners, max_tokens)
    grows = not _nothing_beyond(state, len(ordinals)) and len(homes) == len(ordinals) < left
    if not homes or (whole and grows):
        return None
    shares: list[list[int]] = [[] for _ in range(settings.learners)]
    for ordinal, home in zip(ordinals, homes, strict=False):
        shares[home].append(ordinal)
    return tuple(map(tuple, shares))


def _completes(state: LedgerState, shares: Shares) -> bool:
    """Whether a claim of these is the step's last."""
    assert state.settings is not None
    taken = sum(map(len, shares))
    return state.claimed + taken == state.settings.groups_per_version or _nothing_beyond(state, taken)


def _nothing_beyond(state: LedgerState, ready: int) -> bool:
    """Whether no group will come but that many ready ones."""
    to_come = state.pending or state.leased or state.partial
    return state.exhausted and not to_come and len(state.ready) == ready
