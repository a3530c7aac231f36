"""Rollouts → micro-batches of a bounded size, alike in cost, and which rollouts need no forward at all.

Axes:  R rollouts · N tokens
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from asyncrl.learner.data.batch import MicroBatch


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


def level(
    lengths: Sequence[int], capacity: int, bins: int, even_tokens: float = math.inf
) -> list[list[int]] | None:
    """The items in at most `bins` bins that are level in cost: dearest first, each into the cheapest bin with room.
    None: they do not fit that way. An item costs its length, and its square over `even_tokens` for attention.

    >>> level([4, 5, 3, 9, 1], capacity=8, bins=3), level([5, 5, 5], capacity=8, bins=2)
    ([[3], [1, 4], [0, 2]], None)
    >>> level([8, 4, 4, 4], capacity=16, bins=2), level([8, 4, 4, 4], capacity=16, bins=2, even_tokens=4)
    ([[0, 3], [1, 2]], [[0], [1, 2, 3]])
    """
    filled: list[list[int]] = [[] for _ in range(bins)]
    costs, tokens = [0.0] * bins, [0] * bins
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        fits = [b for b in range(bins) if not filled[b] or tokens[b] + lengths[item] <= capacity]
        if not fits:
            return None
        cheapest = min(fits, key=costs.__getitem__)
        filled[cheapest].append(item)
        tokens[cheapest] += lengths[item]
        costs[cheapest] += lengths[item] * (1 + lengths[item] / even_tokens)
    return [sorted(chosen) for chosen in filled if chosen]


def moving_rollouts(batch: MicroBatch) -> list[int]:
    """The rollouts of groups in which some token has an advantage: a group without one adds exactly 0 to the
    loss."""
    moves_R = torch.zeros(batch.rollouts, dtype=torch.bool)
    moves_R[batch.seq_N[(batch.advantages_N != 0) & batch.loss_mask_N]] = True
    moves_G = torch.zeros(batch.groups, dtype=torch.bool)
    moves_G[batch.group_R[moves_R]] = True
    return torch.nonzero(moves_G[batch.group_R])[:, 0].tolist()


def bins(batch: MicroBatch, rollouts: Sequence[int], max_tokens: int) -> list[list[int]]:
    """These rollouts of `batch`, put together to at most `max_tokens` tokens (a longer rollout goes alone)."""
    filled = first_fit([batch.lengths_R[r] for r in rollouts], max_tokens)
    return [[rollouts[i] for i in chosen] for chosen in filled]


def pack_micro_batches(
    batch: MicroBatch,
    rollouts: Sequence[int],
    max_tokens: int,
    passes: int = 0,
    even_tokens: float = math.inf,
) -> list[MicroBatch]:
    """The `bins` as micro-batches; spread over `passes` of them, alike in cost, where that many are run anyway."""
    lengths = [batch.lengths_R[r] for r in rollouts]
    filled = level(lengths, max_tokens, passes, even_tokens) if passes and lengths else None
    chosen = (
        [[rollouts[i] for i in items] for items in filled] if filled else bins(batch, rollouts, max_tokens)
    )
    return [batch.select(some) for some in chosen]
