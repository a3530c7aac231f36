"""The groups of each optimizer step of a version: a pure function of their ordinals.

ordinals of all ranks    8 9 10 11 12 13          epochs = 2, parts = 3
epoch 0                  [13 9] [11 12] [8 10]    drawn from (seed, version, epoch): the same on every rank and
epoch 1                  [12 9] [13 11] [8 10]    for any number of ranks; each rank trains on its own of them
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from asyncrl.counter_rng import uniform
from asyncrl.types import Version


def mini_batches(
    ordinals: Iterable[int], parts: int, epochs: int, seed: int, version: Version
) -> list[list[int]]:
    """The ordinals of each optimizer step of a version, epoch after epoch: `parts` slices an epoch, whose sizes differ
    by one at most. One slice an epoch keeps the order of the ordinals; fewer groups than `parts` make fewer slices.

    >>> mini_batches([5, 3, 4], parts=1, epochs=2, seed=0, version=0)
    [[3, 4, 5], [3, 4, 5]]
    >>> [len(step) for step in mini_batches(range(7), parts=3, epochs=1, seed=0, version=0)]
    [3, 2, 2]
    """
    ordered = np.array(sorted(ordinals), np.int64)
    steps: list[list[int]] = []
    for epoch in range(epochs):
        drawn = ordered[np.argsort(uniform(seed, version, epoch, ordered))] if parts > 1 else ordered
        steps += [slice_.tolist() for slice_ in np.array_split(drawn, parts) if len(slice_)]
    return steps
