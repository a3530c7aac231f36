"""Whether training sees the lengths that were generated: histograms of group tokens, and their distance.

An asynchronous run is biased when short groups reach the learner and long ones do not (they are late, dropped,
refused). Then the trained histogram differs from that of all groups that were finished.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

NO_LENGTH = -1
"""The bin of tasks that were given up under a lease: nobody knows how long they would have become."""


class LengthBias:
    """Bins are powers of two: bin k counts groups of 2**(k - 1) to 2**k - 1 tokens, bin 0 those without any.

    >>> bias = LengthBias()
    >>> for tokens in (5, 6, 100, 100): bias.finished(tokens)
    >>> bias.trained(5), bias.trained(6)
    (None, None)
    >>> bias.distance
    0.5
    """

    def __init__(self) -> None:
        self._finished: Counter[int] = Counter()
        self._trained: Counter[int] = Counter()

    def finished(self, tokens: int, groups: int = 1) -> None:
        self._finished[tokens.bit_length()] += groups

    def trained(self, tokens: int, groups: int = 1) -> None:
        self._trained[tokens.bit_length()] += groups

    def lost(self) -> None:
        self._finished[NO_LENGTH] += 1

    @property
    def distance(self) -> float:
        """Total variation distance of the two distributions, 0 (the same) to 1; 0 while one is empty."""
        finished, trained = self._finished.total(), self._trained.total()
        if not finished or not trained:
            return 0.0
        bins = self._finished.keys() | self._trained.keys()
        return sum(abs(self._finished[b] / finished - self._trained[b] / trained) for b in bins) / 2

    def to_wire(self) -> dict[str, Any]:
        """Histograms by the least tokens of each bin."""
        return {
            "distance": self.distance,
            "finished": _by_tokens(self._finished),
            "trained": _by_tokens(self._trained),
            "no_length": self._finished[NO_LENGTH],
        }


def _by_tokens(bins: Counter[int]) -> dict[int, int]:
    return {1 << b >> 1: count for b, count in sorted(bins.items()) if b != NO_LENGTH and count > 0}
