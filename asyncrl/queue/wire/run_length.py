"""Versions and loss mask of a group as spans: tokens one after another that share both, which thousands do.

    versions   -1 -1  7  7  7  8 -1  8        ends      2  5  6  7  8
    loss_mask   0  0  1  1  1  1  0  1   ⇄    versions -1  7  8 -1  8
                                              masks     0  1  1  0  1

Axes:  N tokens · K spans
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from asyncrl.errors import WireError
from asyncrl.types import Array


def to_spans(versions: Array, loss_mask: Array) -> tuple[Array, Array, Array]:
    """[N], [N] to ends, versions and masks of the K spans. The last end is N."""
    is_last = np.empty(len(versions), bool)
    is_last[-1:] = True
    np.not_equal(versions[1:], versions[:-1], out=is_last[:-1])
    is_last[:-1] |= loss_mask[1:] != loss_mask[:-1]
    (last,) = is_last.nonzero()
    return last + 1, versions[last], loss_mask[last]


def from_spans(ends: Array, versions: Array, masks: Array, tokens: int) -> tuple[Array, Array]:
    """Versions and loss mask of `tokens` tokens. WireError unless the spans are as long together."""
    stops = ends.tolist()
    # A list: what numpy does for so few numbers takes twice as long when nothing of it is in the caches.
    lengths = [stop - start for start, stop in pairwise([0, *stops])]
    covered = sum(lengths)
    if covered != tokens or min(lengths, default=1) < 1:
        raise WireError(f"{len(stops)} spans that cover {covered} of {tokens} tokens, not one after another")
    return versions.repeat(lengths), masks.repeat(lengths)
