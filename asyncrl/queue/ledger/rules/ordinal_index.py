"""The rank of an ordinal: how many ordinals below it are not dropped.

Only ordinals at or above the frontier (the lowest one that has not ended) are remembered, so that memory
follows the live tasks and not the length of the run.

>>> ranks = OrdinalIndex()
>>> ranks.drop(1); ranks.train(0); ranks.frontier, ranks.rank(4)
(2, 3)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


class OrdinalIndex:
    def __init__(
        self, frontier: int = 0, kept: int = 0, trained: Iterable[int] = (), dropped: Iterable[int] = ()
    ) -> None:
        self.frontier = frontier
        self.kept = kept  # trained ordinals below the frontier
        self.trained = set(trained)  # at or above the frontier
        self.dropped = sorted(dropped)  # at or above the frontier

    def rank(self, ordinal: int) -> int:
        """The rank of an ordinal at or above the frontier."""
        return self.kept + ordinal - self.frontier - bisect_left(self.dropped, ordinal)

    @property
    def trained_total(self) -> int:
        return self.kept + len(self.trained)

    def ended(self, ordinal: int) -> bool:
        return ordinal < self.frontier or ordinal in self.trained or self._is_dropped(ordinal)

    def train(self, ordinal: int) -> None:
        self.trained.add(ordinal)
        self._advance()

    def drop(self, ordinal: int) -> None:
        insort(self.dropped, ordinal)
        self._advance()

    def _is_dropped(self, ordinal: int) -> bool:
        if not self.dropped:
            return False
        at = bisect_left(self.dropped, ordinal)
        return at < len(self.dropped) and self.dropped[at] == ordinal

    def _advance(self) -> None:
        passed = 0
        while True:
            if self.frontier in self.trained:
                self.trained.remove(self.frontier)
                self.kept += 1
            elif passed < len(self.dropped) and self.dropped[passed] == self.frontier:
                passed += 1
            else:
                break
            self.frontier += 1
        del self.dropped[:passed]
