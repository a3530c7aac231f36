"""The sizes of groups: bytes in use and to come, and the lengths that training sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.queue.ledger.state.tasks import TaskRecord

MEMORY = 32
"""Groups after which an older size hardly counts any more: lengths drift while a policy learns."""

NO_LENGTH = -1
"""The bin of tasks that were given up under a lease: their final length is unknown."""


@dataclass(slots=True)
class ByteUsage:
    """The bytes of payloads, and running means of what a group and each stage's columns weigh.

    live, retained  of what is pending, leased, ready or claimed; of what is kept for a rewind only
    unmade, gone    ordinals whose payloads the store may delete after the last event. An unmade task stays, without
                    what was kept of its result; a gone one is forgotten
    group           expected bytes of one group, all stages included

    >>> usage = ByteUsage()
    >>> usage.note("", 100); usage.note("", 200)
    >>> usage.reserved(leased=2, lacking={})
    300
    """

    live: int = 0
    retained: int = 0
    unmade: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    means: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    group: float = 0.0

    def weigh(self, task: TaskRecord, nbytes: int) -> None:
        """The task, which is live, has so many bytes now."""
        self.live += nbytes - task.nbytes
        task.nbytes = nbytes

    def retain(self, nbytes: int) -> None:
        """Live bytes are kept for a rewind only."""
        self.live -= nbytes
        self.retained += nbytes

    def note(self, part: str, nbytes: int) -> None:
        """A group (its part is "") or a stage's columns came in with so many bytes."""
        count = min(self.counts.get(part, 0) + 1, MEMORY)
        mean = self.means.get(part, 0.0)
        self.counts[part], self.means[part] = count, mean + (nbytes - mean) / count
        self.group = sum(self.means.values())

    def reserved(self, leased: int, lacking: Mapping[str, int]) -> int:
        """Bytes to come of `leased` groups, all stages included, and of columns that ready groups lack."""
        columns = sum(n * self.means.get(stage, 0.0) for stage, n in lacking.items()) if lacking else 0.0
        return int(leased * self.group + columns)


@dataclass(slots=True)
class LengthBias:
    """Whether training sees the lengths that were generated: histograms of group tokens, and their distance.

    An asynchronous run is biased when short groups reach the learner and long ones do not (they are late, dropped,
    refused). Then the histogram of the groups trained differs from that of all that were finished. Bins are powers of
    two: bin k counts groups of 2**(k - 1) to 2**k - 1 tokens, bin 0 those without any.

    made, used: the groups finished and the groups trained, by bin

    >>> bias = LengthBias()
    >>> for tokens in (5, 6, 100, 100): bias.finished(tokens)
    >>> bias.trained(5), bias.trained(6)
    (None, None)
    >>> bias.distance
    0.5
    """

    made: Counter[int] = field(default_factory=Counter)
    used: Counter[int] = field(default_factory=Counter)

    def finished(self, tokens: int, groups: int = 1) -> None:
        self.made[tokens.bit_length()] += groups

    def trained(self, tokens: int, groups: int = 1) -> None:
        self.used[tokens.bit_length()] += groups

    def lost(self) -> None:
        self.made[NO_LENGTH] += 1

    @property
    def distance(self) -> float:
        """Total variation distance of the two distributions, 0 (the same) to 1; 0 while one is empty."""
        finished, trained = self.made.total(), self.used.total()
        if not finished or not trained:
            return 0.0
        bins = self.made.keys() | self.used.keys()
        return sum(abs(self.made[b] / finished - self.used[b] / trained) for b in bins) / 2

    def to_wire(self) -> dict[str, Any]:
        """Histograms by the least tokens of each bin."""
        return {
            "distance": self.distance,
            "finished": _by_tokens(self.made),
            "trained": _by_tokens(self.used),
            "no_length": self.made[NO_LENGTH],
        }


def _by_tokens(bins: Counter[int]) -> dict[int, int]:
    return {1 << b >> 1: count for b, count in sorted(bins.items()) if b != NO_LENGTH and count > 0}
