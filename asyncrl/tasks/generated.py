"""Rows that are generated: training tasks and held-out ones of one drawing function."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from random import Random
from typing import Any

from asyncrl.errors import TaskError

GeneratedRow = dict[str, Any]

HELD_OUT_SHARE = 8
"""One row in so many is held out."""
MOST_DRAWS = 200


class GeneratedRows:
    """`size` rows that are made on access. No training task is among the held-out ones, whatever the seeds.

    draw: makes a row of random numbers
    """

    def __init__(self, draw: Callable[[Random], GeneratedRow], size: int, seed: int, held_out: bool) -> None:
        self._draw, self._size, self._seed, self._held_out = draw, size, seed, held_out

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> GeneratedRow:
        draw = Random(f"{self._seed}/{index}")
        for _ in range(MOST_DRAWS):
            if is_held_out(row := self._draw(draw)) == self._held_out:
                return row
        raise TaskError(
            f"row {index}: the options permit too few different rows to hold some out; permit more"
        )


def is_held_out(row: GeneratedRow) -> bool:
    """Whether a task is held out, by a hash of it without its demonstration: the same on every machine."""
    raw = json.dumps({name: row[name] for name in sorted(row) if name != "target"}, default=bytes.hex)
    return hashlib.blake2b(raw.encode(), digest_size=8).digest()[0] % HELD_OUT_SHARE == 0
