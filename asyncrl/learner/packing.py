"""Rollouts → micro-batches of a bounded size, and which rollouts need no forward at all.

Axes:  R rollouts · N tokens
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrl.learner.batch import MicroBatch


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


def moving_rollouts(batch: MicroBatch) -> list[int]:
    """The rollouts of groups in which some token has an advantage: a group without one adds exactly 0 to the
    loss."""
    moves_R = torch.zeros(batch.rollouts, dtype=torch.bool)
    moves_R[batch.seq_N[(batch.advantages_N != 0) & batch.loss_mask_N]] = True
    moves_G = torch.zeros(int(batch.group_R.max()) + 1, dtype=torch.bool)
    moves_G[batch.group_R[moves_R]] = True
    return torch.nonzero(moves_G[batch.group_R])[:, 0].tolist()


def bins(batch: MicroBatch, rollouts: Sequence[int], max_tokens: int) -> list[list[int]]:
    """These rollouts of `batch`, put together to at most `max_tokens` tokens (a longer rollout goes alone)."""
    filled = first_fit([batch.lengths_R[r] for r in rollouts], max_tokens)
    return [[rollouts[i] for i in chosen] for chosen in filled]


def pack(batch: MicroBatch, rollouts: Sequence[int], max_tokens: int) -> list[MicroBatch]:
    """The `bins` as micro-batches."""
    return [batch.select(chosen) for chosen in bins(batch, rollouts, max_tokens)]
