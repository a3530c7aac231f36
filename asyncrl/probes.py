"""Prompts that both pools share: after them, the learner and every generator must agree on the log-probs of a version.

They are token ids below the vocabulary's size, fixed for ever, so that nothing has to be agreed on. Their meaning does
not matter: each runs through all layers, and the lengths differ so that positions and a growing cache are in it.
"""

from __future__ import annotations

import numpy as np

from asyncrl.counter_rng import uniform
from asyncrl.types import Array

LENGTHS = (1, 3, 7, 13)
SEED = 20


def prompts(vocabulary: int, max_length: int) -> list[Array]:
    """[P] int64 each; shorter where `max_length` leaves no room for a token after them."""
    lengths = [min(length, max_length - 1) for length in LENGTHS]
    drawn = [uniform(SEED, prompt, 0, np.arange(length)) for prompt, length in enumerate(lengths)]
    return [(numbers * vocabulary).astype(np.int64) for numbers in drawn]
