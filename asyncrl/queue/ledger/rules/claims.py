"""What the next claim of a step hands to each learner rank."""

from __future__ import annotations

from asyncrl.errors import RefusedError
from asyncrl.queue.ledger.events import StepClaimed
from asyncrl.queue.ledger.ledger_state import LedgerState
from asyncrl.queue.ledger.rules.shares import GroupCost, share_out

Shares = tuple[tuple[int, ...], ...]


def next_claim(book: LedgerState, max_tokens: int, whole: bool) -> StepClaimed | None:
    """The running step's next claim: as it was recorded, or of what is ready. None: not yet.

    whole=False takes what is ready inside the window; whole=True the longest prefix in ordinal order, once it
    cannot grow. RefusedError 'complete': all groups of the step are handed out; 'exhausted': there will be none.
    """
    index = len(book.claims)
    recorded = book.recorded_claim(index)
    if recorded is not None:
        return recorded
    if book.replayed or (book.claims and book.claims[-1].last):
        raise RefusedError("complete", f"all {book.claimed} groups of step {book.version} are handed out")
    shares = _shares(book, max_tokens, whole)
    return None if shares is None else StepClaimed(book.version, index, shares, _completes(book, shares))


def _shares(book: LedgerState, max_tokens: int, whole: bool) -> Shares | None:
    settings = book.settings
    assert settings is not None
    if book.exhausted and book.dry:
        if not book.claimed:
            raise RefusedError("exhausted", f"there are no tasks for step {book.version}")
        return ((),) * settings.learners  # tasks that the step still hoped for were dropped
    left = settings.groups_per_version - book.claimed
    if whole and len(book.ready) < left and book.ready_tokens <= max_tokens and not book.exhausted:
        return None  # it can still grow, without looking at every group
    ordinals = book.ready_prefix(left) if whole else book.ready_in_window(left)
    loads = (
        GroupCost(item.tokens, settings.cost(item.tokens, item.squares))
        for item in map(book.items.__getitem__, ordinals)
    )
    homes = share_out(loads, settings.learners, max_tokens)
    grows = not _nothing_beyond(book, len(ordinals)) and len(homes) == len(ordinals) < left
    if not homes or (whole and grows):
        return None
    shares: list[list[int]] = [[] for _ in range(settings.learners)]
    for ordinal, home in zip(ordinals, homes, strict=False):
        shares[home].append(ordinal)
    return tuple(map(tuple, shares))


def _completes(book: LedgerState, shares: Shares) -> bool:
    """Whether a claim of these is the step's last."""
    assert book.settings is not None
    taken = sum(map(len, shares))
    return book.claimed + taken == book.settings.groups_per_version or _nothing_beyond(book, taken)


def _nothing_beyond(book: LedgerState, ready: int) -> bool:
    """Whether no group will come but that many ready ones."""
    to_come = book.pending or book.leased or book.partial
    return book.exhausted and not to_come and len(book.ready) == ready
