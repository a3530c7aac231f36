"""Which row comes at which place, as a pure function.

Order(size, key).at(epoch, place)       a new order of range(size) in each epoch
part_of(ordinal, shares)                which of several sources has a task, and as its how-manieth
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from hashlib import blake2b
from math import isqrt

import numpy as np

LISTED = 1 << 20
"""Up to so many rows an epoch's order is a list, of 8 MB at most; of more it is computed place by place."""

ROUNDS = 8


class Order:
    """The order of each epoch, fixed by (key, epoch)."""

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        self._size, self._key = size, key
        self._epoch, self._listed = -1, np.empty(0, np.int64)

    def at(self, epoch: int, place: int) -> int:
        if self._size > LISTED:
            return shuffled(place, self._size, (*self._key, epoch))
        if epoch != self._epoch:
            self._listed = np.random.default_rng([*self._key, epoch]).permutation(self._size)
            self._epoch = epoch
        return int(self._listed[place])


def shuffled(place: int, size: int, key: tuple[int, ...]) -> int:
    """A bijection of range(size), another for each `key`, in constant memory.

    A Feistel network over pairs (l, r), 0 ≤ l < a, 0 ≤ r < b with a·b ≥ size, walked on from numbers outside until one
    is inside: Black and Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002), §3 and §4.
    """
    a = isqrt(size - 1) + 1
    b = -(-size // a)
    while True:
        left, right = divmod(place, b)
        for turn in range(0, ROUNDS, 2):
            left = (left + _hash(key, turn, right)) % a
            right = (right + _hash(key, turn + 1, left)) % b
        place = left * b + right
        if place < size:
            return place


def part_of(ordinal: int, shares: Sequence[Fraction]) -> tuple[int, int]:
    """(part, how many tasks that part had before). shares: of each part in all tasks; their sum is 1.

    The first part takes ordinal t where ⌊(t+1)·share⌋ > ⌊t·share⌋, the second does the same with what is left, and so
    on: of the first t tasks a part has its share to within its place in the list.

    >>> [part_of(t, [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)]) for t in range(6)]
    [(2, 0), (0, 0), (1, 0), (0, 1), (2, 1), (0, 2)]
    """
    left = Fraction(1)
    for part, share in enumerate(shares[:-1]):
        of_left = share / left
        before = ordinal * of_left // 1
        if (ordinal + 1) * of_left // 1 > before:
            return part, before
        ordinal, left = ordinal - before, left - share
    return len(shares) - 1, ordinal


def _hash(key: tuple[int, ...], turn: int, half: int) -> int:
    text = "/".join(map(str, (*key, turn, half)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
