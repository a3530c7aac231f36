"""The queue's process in a simulation: one thread, which works off requests in the order in which they come.

    lease    broker: a third of group_s for each group
    commit   broker: a third of group_s, and half of byte_s for its payload
    claim    broker: claim_s for each data rank; a third of group_s and half of byte_s for each group

With payload brokers, payloads pass the one that the group's ordinal chooses, and the broker has the ledger alone:

    commit   payload broker: half of byte_s ─▸ broker: a third of group_s
    claim    broker: claim_s, a third of group_s ─▸ payload brokers, at the same time: half of byte_s

Generators and ranks take `generator_share` and `rank_share` of the broker's time besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.twin.outcome import Setup
from asyncrl.twin.times import QueueTimes

LEAST = 1e-3
"""Share of its time that a broker always has left for requests."""


class Payload(NamedTuple):
    """Of a group. tokens: prompts included"""

    ordinal: int
    tokens: float


class Brokers:
    """now: seconds. Methods return the seconds until the request is answered."""

    def __init__(self, times: QueueTimes, setup: Setup) -> None:
        self._times, self._ranks = times, setup.data_ranks
        taken = times.generator_share * setup.generators + times.rank_share * setup.data_ranks
        self._broker = _Thread(taken)
        self._payload_brokers = [_Thread() for _ in range(setup.payload_brokers)]

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of requests so far: of the broker, and of each payload broker."""
        return tuple(thread.seconds for thread in (self._broker, *self._payload_brokers))

    def busy(self, before: Sequence[float], passed_s: float) -> tuple[float, ...]:
        """The share of its time that each of them was busy in the last `passed_s`. before: the seconds then"""
        threads = (self._broker, *self._payload_brokers)
        return tuple(
            thread.taken + (thread.seconds - then) / passed_s
            for thread, then in zip(threads, before, strict=True)
        )

    def lease(self, now: float, groups: int) -> float:
        return self._broker.answers(now, groups * self._times.group_s / 3)

    def keep(self, now: float, payload: Payload) -> float:
        """A payload on its way to its payload broker, before the commit."""
        return self._half(now, [payload]) if self._payload_brokers else 0.0

    def commit(self, now: float, payload: Payload) -> float:
        through = 0.0 if self._payload_brokers else self._half_s(payload)
        return self._broker.answers(now, self._times.group_s / 3 + through)

    def claim(self, now: float, payloads: Sequence[Payload]) -> float:
        """One claim of all data ranks."""
        seconds = self._ranks * self._times.claim_s + len(payloads) * self._times.group_s / 3
        if not self._payload_brokers:
            return self._broker.answers(now, seconds + sum(map(self._half_s, payloads)))
        answered = self._broker.answers(now, seconds)
        return answered + self._half(now + answered, payloads)

    def _half(self, now: float, payloads: Sequence[Payload]) -> float:
        """Payloads into their payload brokers, or out of them."""
        work = [0.0] * len(self._payload_brokers)
        for payload in payloads:
            work[payload.ordinal % len(work)] += self._half_s(payload)
        return max(
            thread.answers(now, seconds) for thread, seconds in zip(self._payload_brokers, work, strict=True)
        )

    def _half_s(self, payload: Payload) -> float:
        return payload.tokens * self._times.token_bytes * self._times.byte_s / 2


class _Thread:
    """taken: share of its time that is not for requests · seconds: of requests so far"""

    def __init__(self, taken: float = 0.0) -> None:
        self.taken, self.seconds = taken, 0.0
        self._spare, self._free_at = max(LEAST, 1 - taken), 0.0

    def answers(self, now: float, seconds: float) -> float:
        self.seconds += seconds
        self._free_at = max(self._free_at, now) + seconds / self._spare
        return self._free_at - now
