"""What is carried: groups of 8 rollouts with four token columns, the same for every system. Knows no system.

Axes:  R = 8 rows of a group · T tokens of a row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

ROWS = 8
DTYPES = {"token_ids": np.int64, "logprobs": np.float32, "loss_mask": np.int8, "versions": np.int32}
TOKEN_BYTES = sum(np.dtype(dtype).itemsize for dtype in DTYPES.values())

DEPTH = 96
"""Groups that a system may hold at once, so that none wins by letting its memory grow."""

IN_FLIGHT = DEPTH // 2
"""Groups under way to a broker of ZeroMQ, and from it, at once; the other systems say theirs."""

POOL = 16
"""Distinct groups, sent in turn: more than a cache holds of the large ones."""

AHEAD = 1 << 20
"""The version of the first tokens: a producer ahead of the learner is never held back by the staleness bound."""

PROMPT, LATER = 1 / 4, 3 / 4
"""Shares of a row: its prompt has mask 0 and version -1; the tokens from `LATER` on are of the next version."""

Columns = Mapping[str, np.ndarray | Sequence[np.ndarray]]
"""As they arrive: name -> [R, T], or R arrays of T."""

Arrays = dict[str, np.ndarray]
"""As they are sent: name -> [R, T]."""


@dataclass(frozen=True, slots=True)
class Load:
    """`groups` groups of 8 rows with `tokens` tokens each. pace_s: seconds from one to the next; 0: streaming."""

    groups: int
    tokens: int
    pace_s: float = 0.0

    @property
    def group_bytes(self) -> int:
        return ROWS * self.tokens * TOKEN_BYTES


class Source:
    """The groups of a load by number. The first token tells which one of the pool it is."""

    def __init__(self, load: Load) -> None:
        self._pool = [_columns(load.tokens, seed) for seed in range(POOL)]

    def columns(self, i: int) -> Arrays:
        return self._pool[i % POOL]


def check(load: Load, i: int, columns: Columns) -> None:
    """AssertionError unless these can be the columns of group `i`."""
    for name in DTYPES:
        assert (len(columns[name]), len(columns[name][-1])) == (ROWS, load.tokens), (i, name)
    token, *prompt = (int(columns[name][0][0]) for name in ("token_ids", "versions", "loss_mask"))
    last = [int(columns[name][-1][-1]) for name in ("versions", "loss_mask")]
    assert (token, prompt, last) == (i % POOL, [-1, 0], [AHEAD + 1, 1]), (i, token, prompt, last)


def _columns(tokens: int, seed: int) -> Arrays:
    random, shape = np.random.default_rng(seed), (ROWS, tokens)
    token_ids = random.integers(0, 150_000, shape, dtype=np.int64)
    token_ids[0, 0] = seed
    versions, loss_mask = np.full(shape, AHEAD, np.int32), np.ones(shape, np.int8)
    versions[:, int(LATER * tokens) :] += 1
    prompt = slice(int(PROMPT * tokens))
    versions[:, prompt], loss_mask[:, prompt] = -1, 0
    return {
        "token_ids": token_ids,
        "logprobs": random.standard_normal(shape, dtype=np.float32),
        "loss_mask": loss_mask,
        "versions": versions,
    }
