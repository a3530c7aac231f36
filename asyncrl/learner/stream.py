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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from asyncrl.errors import AsyncRLError, DeadlineError, RefusedError, TrainingError
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.ports import Claim, LearnerClient
from asyncrl.telemetry.spans import Spans
from asyncrl.telemetry.status import UNDER_WAY, ProcessStatus
from asyncrl.types import Group

TRAIN = "train"
PARK_S = 0.5
"""Longest wait of one request: how soon a wish to stop is noticed while nothing arrives."""


TOO_FLAT = (
    "nearly all groups have equal rewards: give tasks that are solved now and then, raise batch.group_size, "
    "or set algorithm.filter=none"
)


class StopWaiting(Exception):  # noqa: N818  (a decision, not a failure)
    """Somebody wants to stop and the rest of this step is not there yet."""


class StepBegunAnew(Exception):  # noqa: N818
    """The queue has taken the step apart: what it has handed out of it counts no more."""


class StreamExhausted(Exception):  # noqa: N818
    """There are no tasks for this step."""


class NoGroups(DeadlineError):  # noqa: N818
    """No group came for `deadline_s`: raised on all ranks at once, between two versions of the weights."""


class GroupStream:
    """Claims of this rank. `stopping` is asked between waits, `idle` is called between them, `status` shows the wait
    for generators."""

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
        status: ProcessStatus | None = None,
    ) -> None:
        self._status = status or ProcessStatus()
        self._client, self._backend, self._spans = client, backend, spans
        self._learner_epoch, self._max_tokens, self._whole = learner_epoch, max_tokens, whole
        self._deadline_s, self._stopping, self._idle = deadline_s, stopping, idle
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="claims")
        self.attempt = 0  # of the step whose claims came last

    def step(self, step: int) -> Iterator[list[Group]]:
        """This rank's groups of step `step`, one list per claim (maybe empty: other ranks have some).

        Raises StopWaiting, StepBegunAnew, StreamExhausted, and NoGroups when none came for `deadline_s`; all ranks
        raise the same.
        """
        index, last = 0, False
        attempt: int | None = None
        asked = self._ask(step, index, attempt)
        while not last:
            waiting = self._status.waiting(
                f"a group for version {step + 1} from the generators", self._deadline_s
            )
            with self._spans("wait/groups"), waiting:
                claim = self._agreed(asked, step, index, attempt)
            last, index, attempt = claim.last, index + 1, claim.attempt
            self.attempt = attempt
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
            rank=self._backend.data_rank,
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
            late = claim is None and time.monotonic() - since > self._deadline_s
            have = None if claim is None else claim.attempt
            every = self._backend.exchange([have, self._stopping(), why, late])
            attempts, stop, refusals, too_late = zip(*every, strict=True)
            if "abandoned" in refusals or len(set(attempts) - {None}) > 1:
                raise StepBegunAnew
            if claim is not None and None not in attempts:
                return claim
            if "exhausted" in refusals:
                raise StreamExhausted
            if any(stop):
                raise StopWaiting
            if any(too_late):
                who = f"learner rank {self._backend.rank}"
                what = f"a group for version {step + 1} (claim {index})"
                raise NoGroups(who, "the generators", what, self._deadline_s, self._where_tasks_are())
            self._idle()
            if claim is None:
                claim, why = _answer(self._ask(step, index, attempt))

    def _where_tasks_are(self) -> str:
        """For the end of a long wait: what the queue knows of the stream's tasks, and why some never come."""
        try:
            status = self._client.status()
            return _told(status["streams"][TRAIN]) + _calls_under_way(status["workers"])
        except AsyncRLError as error:
            return f"the queue does not say why ({error})"


def check_size(group: Group, size: int) -> None:
    """Raises TrainingError for a group with another number of rollouts than `batch.group_size`."""
    if len(group.lengths) != size:
        raise TrainingError(
            f"task {group.task.ordinal} has {len(group.lengths)} rollouts, and batch.group_size={size}: it was made "
            "under another configuration than the learner's"
        )


def _told(counts: Mapping[str, Any]) -> str:
    places = ", ".join(f"{counts[place]} {place}" for place in ("pending", "leased", "ready", "trained"))
    reasons = sorted(counts["dropped_by_reason"].items(), key=lambda entry: -entry[1])
    dropped = ", ".join(f"{count} {reason}" for reason, count in reasons)
    told = f"tasks: {places}; dropped: {dropped or 'none'}"
    stages = counts.get("stages", {}).items()
    waiting = [f"{stage['waiting'] + stage['leased']} {name}" for name, stage in stages]
    told += f"; groups that wait for a pool: {', '.join(waiting)}" if waiting else ""
    return f"{told}; {TOO_FLAT}" if reasons and reasons[0][0] == "filtered" else told


def _calls_under_way(workers: Mapping[str, Mapping[str, Any]]) -> str:
    """The reward functions that generators and pools wait for, by their last reports."""
    calls = Counter[str]()
    for stats in workers.values():
        calls.update(
            {name.removeprefix(UNDER_WAY): n for name, n in stats.items() if name.startswith(UNDER_WAY) and n}
        )
    named = ", ".join(f"{count} of {function}" for function, count in calls.most_common())
    return f"; reward calls under way: {named}" if named else ""


def _answer(asked: Future[Claim | None]) -> tuple[Claim | None, str]:
    """(the claim if there is one, why there will be none)."""
    try:
        return asked.result(), ""
    except RefusedError as refusal:
        if refusal.reason not in ("exhausted", "abandoned"):
            raise
        return None, refusal.reason
