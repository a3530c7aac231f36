"""The queue in a simulation: it works off requests one after another, in the order in which they come.

    lease    queue: a third of group_s for each group
    commit   queue: a third of group_s, and half of byte_s for its payload
    claim    queue: request_s for each data rank but one; a third of group_s and half of byte_s for each group

With payload brokers, payloads pass the one that the group's ordinal chooses, and the queue has the ledger alone:

    commit   payload broker: request_s, half of byte_s ─▸ queue: a third of group_s
    claim    queue: as above, without byte_s ─▸ payload brokers, at the same time: request_s for each data rank, half of
             byte_s for each group

Generators and ranks take `generator_share` and `rank_share` of the queue's time besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.twin.outcome import Setup
from asyncrl.twin.times import QueueTimes

SPARE = 1e-3
"""The least share of its time that the queue has for requests."""


class SentGroup(NamedTuple):
    """A group on its way to the queue or from it. tokens: prompts included"""

    ordinal: int
    tokens: float


class Brokers:
    """The queue and its payload brokers. now: seconds, which never fall from call to call.

    Methods that take a request return the seconds until it is answered.
    """

    def __init__(self, times: QueueTimes, setup: Setup) -> None:
        self._times, self._ranks = times, setup.data_ranks
        taken = times.generator_share * setup.generators + times.rank_share * setup.data_ranks
        self._queue = _Server(taken)
        self._payload_brokers = [_Server() for _ in range(setup.payload_brokers)]
        self._all = (self._queue, *self._payload_brokers)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of all requests so far: of the queue, and of each payload broker."""
        return tuple(server.seconds for server in self._all)

    def busy(self, before: Sequence[float], after: Sequence[float], passed_s: float) -> tuple[float, ...]:
        """The share of its time that each of them is busy. before, after: their seconds, `passed_s` apart"""
        return tuple(
            server.taken + (last - first) / passed_s
            for server, first, last in zip(self._all, before, after, strict=True)
        )

    def lease(self, now: float, groups: int) -> float:
        return self._queue.answers(now, groups * self._times.group_s / 3)

    def store(self, now: float, group: SentGroup) -> float:
        """A group's payload goes to its payload broker, if there are any, before its commit."""
        if not self._payload_brokers:
            return 0.0
        seconds = self._times.request_s + self._one_way_s(group)
        return self._payload_brokers[self._chosen(group)].answers(now, seconds)

    def commit(self, now: float, group: SentGroup) -> float:
        through = 0.0 if self._payload_brokers else self._one_way_s(group)
        return self._queue.answers(now, self._times.group_s / 3 + through)

    def claim(self, now: float, groups: Sequence[SentGroup]) -> float:
        """One claim of all data ranks. With payload brokers the answer only names the groups."""
        through = 0.0 if self._payload_brokers else sum(map(self._one_way_s, groups))
        of_ranks = (self._ranks - 1) * self._times.request_s
        return self._queue.answers(now, of_ranks + len(groups) * self._times.group_s / 3 + through)

    def fetch(self, now: float, groups: Sequence[SentGroup]) -> float:
        """All ranks get the payloads of a claim from the payload brokers, if there are any."""
        if not self._payload_brokers:
            return 0.0
        work = dict.fromkeys(map(self._chosen, groups), self._ranks * self._times.request_s)
        for group in groups:
            work[self._chosen(group)] += self._one_way_s(group)
        return max(self._payload_brokers[at].answers(now, seconds) for at, seconds in work.items())

    def _chosen(self, group: SentGroup) -> int:
        return group.ordinal % len(self._payload_brokers)

    def _one_way_s(self, group: SentGroup) -> float:
        return group.tokens * self._times.token_bytes * self._times.byte_s / 2


class _Server:
    """taken: share of its time that is not for requests · seconds: of all requests so far"""

    def __init__(self, taken: float = 0.0) -> None:
        self.taken, self.seconds = taken, 0.0
        self._spare, self._free_at = max(SPARE, 1 - taken), 0.0

    def answers(self, now: float, seconds: float) -> float:
        self.seconds += seconds
        self._free_at = max(self._free_at, now) + seconds / self._spare
        return self._free_at - now
