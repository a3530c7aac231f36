"""Rollouts → micro-batches of a bounded size, alike in cost, and which rollouts need no forward at all.

Axes:  R rollouts · N tokens
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.shared_prompts import Need, needs_of

WORTHWHILE = 0.1
"""The share of tokens that sharing must save: bound rollouts fill micro-batches less evenly."""

WHOLE = 4
"""Attention keeps the keys and values of whole documents, prompts each time: they are bounded by so many times
`learner.micro_batch_tokens`."""

SLACKS = (1.0, 1.1, 1.25, 1.5, 2.0)
"""Sizes of level bins that are tried, over the mean."""


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put items, in order, each into the first bin with room; an item above `capacity` gets a bin of its own.

    >>> first_fit([4, 5, 3, 9, 1], capacity=8)
    [[0, 2, 4], [1], [3]]
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for item, length in enumerate(lengths):
        at = next((i for i, left in enumerate(room) if left >= length), None)
        if at is None:
            bins.append([])
            room.append(capacity)
            at = len(bins) - 1
        bins[at].append(item)
        room[at] -= length
    return bins


def fit_shared(items: Sequence[Need], capacity: int) -> list[list[int]]:
    """As `first_fit`, of rollouts that add a prompt that a bin has already at no cost: each goes into the bin that has
    one of its prompts, if that one has room. With prompts counted each time, a bin has WHOLE times its capacity.

    >>> a, b = {0: 4}, {1: 3}
    >>> items = [Need(1, a, 5), Need(3, a, 7), Need(1, b, 4), Need(1, a, 5), Need(2, b, 5)]
    >>> fit_shared(items, capacity=8)
    [[0, 1], [2, 4], [3]]
    """
    bins: list[list[int]] = []
    held: list[set[int]] = []
    room: list[int] = []
    whole: list[int] = []
    newest: dict[int, int] = {}  # prompt ▸ the last bin that has it

    def added(item: Need, at: int) -> int:
        return item.own + sum(length for number, length in item.prompts.items() if number not in held[at])

    for number, item in enumerate(items):
        with_prompt = [newest[prompt] for prompt in item.prompts if prompt in newest]
        order = itertools.chain(with_prompt, range(len(bins)))
        fits = (b for b in order if added(item, b) <= room[b] and item.whole <= whole[b])
        at = next(fits, None)
        if at is None:
            at = len(bins)
            bins.append([])
            held.append(set())
            room.append(capacity)
            whole.append(WHOLE * capacity)
        room[at] -= added(item, at)
        whole[at] -= item.whole
        bins[at].append(number)
        held[at] |= item.prompts.keys()
        newest |= dict.fromkeys(item.prompts, at)
    return bins


def level(lengths: Sequence[int], costs: Sequence[float], capacity: int, bins: int) -> list[list[int]] | None:
    """The items in at most `bins` bins that are level in cost: dearest first, each into the cheapest bin with room.
    None: they do not fit that way.

    >>> level([4, 5, 3, 9, 1], [4, 5, 3, 9, 1], capacity=8, bins=3), level([5, 5, 5], [5, 5, 5], capacity=8, bins=2)
    ([[3], [1, 4], [0, 2]], None)
    >>> level([8, 4, 4, 4], [8, 4, 4, 4], capacity=16, bins=2), level([8, 4, 4, 4], [24, 8, 8, 8], capacity=16, bins=2)
    ([[0, 3], [1, 2]], [[0], [1, 2, 3]])
    """
    filled: list[list[int]] = [[] for _ in range(bins)]
    spent, tokens = [0.0] * bins, [0] * bins
    for item in sorted(range(len(lengths)), key=lambda item: -costs[item]):
        fits = [b for b in range(bins) if not filled[b] or tokens[b] + lengths[item] <= capacity]
        if not fits:
            return None
        cheapest = min(fits, key=spent.__getitem__)
        filled[cheapest].append(item)
        tokens[cheapest] += lengths[item]
        spent[cheapest] += costs[item]
    return [sorted(chosen) for chosen in filled if chosen]


def level_shared(items: Sequence[Need], capacity: int, bins: int) -> list[list[int]] | None:
    """The items in at most `bins` bins of about the same number of tokens; None: they do not fit that way."""
    for slack in SLACKS:
        filled = fit_shared(items, min(capacity, math.ceil(slack * joint_tokens(items) / bins)))
        if len(filled) <= bins:
            return filled
    return None


def moving_rollouts(batch: MicroBatch) -> list[int]:
    """The rollouts of groups in which some token has an advantage: a group without one adds exactly 0 to the
    loss."""
    moves_R = torch.zeros(batch.rollouts, dtype=torch.bool)
    moves_R[batch.seq_N[(batch.advantages_N != 0) & batch.loss_mask_N]] = True
    moves_G = torch.zeros(batch.groups, dtype=torch.bool)
    moves_G[batch.group_R[moves_R]] = True
    return torch.nonzero(moves_G[batch.group_R])[:, 0].tolist()


def bins(batch: MicroBatch, rollouts: Sequence[int], max_tokens: int, share: bool = False) -> list[list[int]]:
    """These rollouts of `batch`, put together to at most `max_tokens` tokens (a longer rollout goes alone).

    share: whether a forward computes repeated prompts once; rollouts with one in common then stay together if that
    saves much.
    """
    lengths = [batch.lengths_R[r] for r in rollouts]
    if 0 < sum(lengths) <= max_tokens:
        return [list(rollouts)]
    items = worthwhile_needs(batch, rollouts) if share else None
    filled = fit_shared(items, max_tokens) if items else first_fit(lengths, max_tokens)
    return [[rollouts[i] for i in chosen] for chosen in filled]


def pack_micro_batches(
    batch: MicroBatch,
    rollouts: Sequence[int],
    max_tokens: int,
    passes: int = 0,
    even_tokens: float = math.inf,
    share: bool = False,
) -> list[MicroBatch]:
    """The `bins` as micro-batches; spread over `passes` of them, alike in cost, where that many are run anyway. A
    rollout costs its tokens, and the square of its length over `even_tokens` for attention. Where prompts are shared,
    tokens alone count."""
    lengths = [batch.lengths_R[r] for r in rollouts]
    filled: list[list[int]] | None = None
    if passes > 1:
        costs = [length * (1 + length / even_tokens) for length in lengths]
        items = worthwhile_needs(batch, rollouts) if share else None
        if items:
            filled = level_shared(items, max_tokens, passes)
        else:
            filled = level(lengths, costs, max_tokens, passes)
    if filled is None:
        return [batch.select(some) for some in bins(batch, rollouts, max_tokens, share)]
    return [batch.select([rollouts[i] for i in chosen]) for chosen in filled]


def worthwhile_needs(batch: MicroBatch, rollouts: Sequence[int]) -> list[Need] | None:
    """The needs of these rollouts; None where sharing saves too little to bind rollouts to each other."""
    items = needs_of(batch, rollouts)
    every = sum(batch.lengths_R[r] for r in rollouts)
    return items if every - joint_tokens(items) >= WORTHWHILE * every > 0 else None


def joint_tokens(items: Sequence[Need]) -> int:
    """Tokens of all items in one bin."""
    every = {number: length for item in items for number, length in item.prompts.items()}
    return sum(item.own for item in items) + sum(every.values())
