"""The expected bytes of a group, from earlier groups."""

from __future__ import annotations

from collections.abc import Mapping

MEMORY = 32
"""Groups after which an older size hardly counts any more: lengths drift while a policy learns."""


class GroupSizes:
    """Running means of what a group, and each stage's columns, weigh.

    >>> sizes = GroupSizes()
    >>> sizes.note("", 100); sizes.note("", 200)
    >>> sizes.reserved(leased=2, lacking={})
    300
    """

    def __init__(self) -> None:
        self.means: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.whole = 0.0  # bytes of one group, all stages included

    def note(self, part: str, nbytes: int) -> None:
        """A group (its part is "") or a stage's columns came in with so many bytes."""
        count = min(self.counts.get(part, 0) + 1, MEMORY)
        mean = self.means.get(part, 0.0)
        self.counts[part], self.means[part] = count, mean + (nbytes - mean) / count
        self.whole = sum(self.means.values())

    def reserved(self, leased: int, lacking: Mapping[str, int]) -> int:
        """Bytes to come of `leased` groups, all stages included, and of columns that ready groups lack."""
        columns = sum(n * self.means.get(stage, 0.0) for stage, n in lacking.items()) if lacking else 0.0
        return int(leased * self.whole + columns)
