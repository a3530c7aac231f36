"""The groups of one step, as they arrive: the next claim is fetched while the last one is computed.

    trainer thread      ─ claim 0 ─┬─ compute 0 ──┬─ claim 1 ready? ─┬─ compute 1 ── …  until the `last` one
                                   │              │                  │
    prefetch thread                └─▸ claim 1 ───┘                  └─▸ claim 2
                                        parks in the broker until a group is ready

The trainer waits for the slower of compute and claim. All ranks go on together: each says whether it has its
claim and whether it was asked to stop, and they take the claim only when every one of them has it. If the queue
has taken the step apart meanwhile (it came back without some of its groups, or one cannot be read), all of them
begin it anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from asyncrl.errors import DeadlineError, RefusedError
from asyncrl.learner.backend import Backend
from asyncrl.learner.ports import Claim, LearnerClient
from asyncrl.telemetry.spans import Spans
from asyncrl.types import Group

TRAIN = "train"
PARK_S = 0.5
"""Longest wait of one request: how soon a wish to stop is noticed while nothing arrives."""


class StopWaiting(Exception):  # noqa: N818  (a decision, not a failure)
    """Somebody wants to stop and the rest of this step is not there yet."""


class StepBegunAnew(Exception):  # noqa: N818
    """The queue has taken the step apart: what it has handed out of it counts no more."""


class StreamExhausted(Exception):  # noqa: N818
    """There are no tasks for this step."""


class GroupStream:
    """Claims of this rank. `stopping` is asked between waits, `idle` is called between them."""

    def __init__(
        self,
        client: LearnerClient,
        backend: Backend,
        spans: Spans,
        *,
        learner_epoch: int,
        max_tokens: int,
        whole: bool,
        deadline_s: float,
        stopping: Callable[[], bool],
        idle: Callable[[], None],
    ) -> None:
        self._client, self._backend, self._spans = client, backend, spans
        self._learner_epoch, self._max_tokens, self._whole = learner_epoch, max_tokens, whole
        self._deadline_s, self._stopping, self._idle = deadline_s, stopping, idle
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="claims")

    def step(self, step: int) -> Iterator[list[Group]]:
        """This rank's groups of step `step`, one list per claim (maybe empty: other ranks have some).

        Raises StopWaiting, StepBegunAnew, StreamExhausted, and DeadlineError when no group came for `deadline_s`.
        """
        index, last = 0, False
        attempt: int | None = None
        asked = self._ask(step, index, attempt)
        while not last:
            with self._spans("wait/groups"):
                claim = self._agreed(asked, step, index, attempt)
            last, index, attempt = claim.last, index + 1, claim.attempt
            if not last:
                asked = self._ask(step, index, attempt)
            yield claim.groups

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _ask(self, step: int, index: int, attempt: int | None) -> Future[Claim | None]:
        return self._thread.submit(
            self._client.claim,
            TRAIN,
            learner_epoch=self._learner_epoch,
            step=step,
            index=index,
            rank=self._backend.rank,
            max_tokens=self._max_tokens,
            whole=self._whole,
            wait_s=PARK_S,
            attempt=attempt,
        )

    def _agreed(self, asked: Future[Claim | None], step: int, index: int, attempt: int | None) -> Claim:
        """The claim, once every rank has its own. A claim is the same whenever it is asked for again."""
        since = time.monotonic()
        claim, why = _answer(asked)
        while True:
            have = None if claim is None else claim.attempt
            every = self._backend.exchange([have, self._stopping(), why])
            attempts, refusals = {have for have, _, _ in every}, {why for _, _, why in every}
            if "abandoned" in refusals or len(attempts - {None}) > 1:
                raise StepBegunAnew
            if claim is not None and None not in attempts:
                return claim
            if "exhausted" in refusals:
                raise StreamExhausted
            if any(stop for _, stop, _ in every):
                raise StopWaiting
            if claim is None and time.monotonic() - since > self._deadline_s:
                who = f"learner rank {self._backend.rank}"
                what = f"a group for version {step + 1} (claim {index})"
                raise DeadlineError(who, "the generators", what, self._deadline_s)
            self._idle()
            if claim is None:
                claim, why = _answer(self._ask(step, index, attempt))


def _answer(asked: Future[Claim | None]) -> tuple[Claim | None, str]:
    """(the claim if there is one, why there will be none)."""
    try:
        return asked.result(), ""
    except RefusedError as refusal:
        if refusal.reason not in ("exhausted", "abandoned"):
            raise
        return None, refusal.reason
