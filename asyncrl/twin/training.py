"""The learner of a simulated run: its claims, its computation, and the end of each version.

    claim 0 ─┬─ compute 0 ──┬─ claim 1 there? ─┬─ compute 1 ── … ── version_s ── publish_s ── report_s ──▸ trained,
             └─▸ claim 1 ───┘                  └─▸ claim 2                                                 published

It waits for the slower of computation and claim, as learner/train_stream.py does (where a first claim comes ahead if
enough is ready), or with `whole_batch` computes once all groups of the version are in.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from asyncrl.queue.ledger import learner_commands
from asyncrl.queue.protocol import requests as rq
from asyncrl.types import TRAIN

if TYPE_CHECKING:
    from asyncrl.twin.brokers import SentGroup
    from asyncrl.twin.simulate import Run

NO_LIMIT = 1 << 60
COMPUTE, WAIT_GROUPS, WAIT_PUBLISH, WAIT_QUEUE = "compute", "wait/groups", "wait/publish", "wait/queue"
"""Names of the learner's seconds, as its spans have them."""


class SimulatedLearner:
    """Claims, one ahead of the computation (learner/train_stream.py), then the end of the version."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ledger, self._setup, self._times = run.ledger, run.setup, run.times
        self._epoch = self._ledger.state.learner_epoch
        limit = None if self._setup.colocated else self._setup.claim_tokens
        self._most_tokens = NO_LIMIT if limit is None else limit * self._setup.data_ranks
        self.seconds: dict[str, float] = dict.fromkeys((COMPUTE, WAIT_GROUPS, WAIT_PUBLISH, WAIT_QUEUE), 0.0)
        self._computing, self._since = False, 0.0
        self._begin_version()

    def _begin_version(self) -> None:
        self._next: tuple[int, ...] | None = None
        self._there = False  # whether the next claim has come
        self._claims, self._all_claimed = 0, False
        self._groups: list[int] = []  # of the version so far

    def claim(self) -> None:
        """Request the next claim, unless one is here that the computation has not begun."""
        if self._next is not None or self._all_claimed:
            return
        step, whole = self._ledger.state.steps.version, self._setup.max_staleness == 0
        of_step = partial(rq.ClaimRequest, stream=TRAIN, learner_epoch=self._epoch, step=step, rank=0)
        request = of_step(index=self._claims, max_tokens=self._most_tokens, whole=whole)
        claimed = learner_commands.claim(self._ledger, request)
        if claimed is not None:
            self._next, self._all_claimed = claimed.ordinals, claimed.last
            self._claims += 1
            self._run.admit()
            groups = [self._run.sent_group(ordinal) for ordinal in claimed.ordinals]
            self._run.once(self._run.brokers.claim(self._run.now, groups), self._fetch, groups)

    def _fetch(self, groups: Sequence[SentGroup]) -> None:
        self._run.once(self._run.brokers.fetch(self._run.now, groups), self._arrive)

    def _arrive(self) -> None:
        """Compute the claim, unless the one before it is still computed."""
        self._there = True
        if self._computing:
            return
        self._computing = True
        first_s = self._times.learner.first_claim_s if not self._groups else 0.0
        self._run.after(self._times.sync.queue_s + first_s, self._compute)

    def _compute(self) -> None:
        assert self._next is not None
        self._computing, self._there = True, False
        self._spend(WAIT_GROUPS)
        ordinals, self._next = self._next, None
        self._groups += ordinals
        last = self._all_claimed
        self.claim()
        self._run.after(self._seconds_of(ordinals, last), self._computed, last)

    def _seconds_of(self, ordinals: Sequence[int], last: bool) -> float:
        learner = self._times.learner
        seconds = learner.version_s if last else 0.0
        if self._setup.whole_batch:
            ordinals = self._groups if last else ()
        if ordinals:
            records = self._ledger.state.tasks.records
            tokens = [records[ordinal].tokens for ordinal in ordinals]
            seconds += learner.claim_s + learner.token_s * busiest(tokens, self._setup.data_ranks)
        return seconds

    def _computed(self, last: bool) -> None:
        self._spend(COMPUTE)
        if last:
            self._run.after(self._times.learner.publish_s, self._report)
            return
        self._computing = False
        if self._there:  # it came while the learner computed
            self._compute()

    def _report(self) -> None:
        self._spend(WAIT_PUBLISH)
        self._run.once(self._times.learner.report_s, self._publish)

    def _publish(self) -> None:
        self._spend(WAIT_QUEUE)
        version, records = self._ledger.state.steps.version, self._ledger.state.tasks.records
        trained = [
            (version - records[ordinal].start_version, self._run.policy_tokens(ordinal))
            for ordinal in self._groups
        ]
        request = rq.TrainedRequest(stream=TRAIN, learner_epoch=self._epoch, step=version)
        learner_commands.trained(self._ledger, request)
        self._computing = False
        self._begin_version()
        self._run.measure(self.seconds, trained, version + 1)
        self._run.publish(version + 1)
        self._run.admit()
        self.claim()

    def _spend(self, name: str) -> None:
        self.seconds[name] += self._run.now - self._since
        self._since = self._run.now


def busiest(tokens: Sequence[int], ranks: int) -> int:
    """Tokens of the busiest rank, where the groups are dealt out largest first to the rank with the least.

    >>> busiest([5, 3, 1, 9], ranks=2), busiest([4, 4], ranks=8)
    (9, 4)
    """
    if ranks == 1:
        return sum(tokens)
    loads = [0] * min(ranks, len(tokens))
    for count in sorted(tokens, reverse=True):
        heapq.heapreplace(loads, loads[0] + count)
    return max(loads)
