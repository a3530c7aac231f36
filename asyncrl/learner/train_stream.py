"""The train stream of one learner rank: the groups of each step, as they arrive, and reports about the step.

    trainer thread      ─ claim 0 ─┬─ compute 0 ──┬─ claim 1 there? ─┬─ compute 1, the last ─┬─ publish ─┬─ compute 0 ─
                                   │              │                  │                       │           │
    claims thread                  └─▸ claim 1 ───┘                  └─▸ claim 0, ahead ───────────────▸ └─▸ again
                                        waits in the broker until a group is ready;          │
                                        its groups are checked and packed                    │
    reports thread                                                                           └─▸ report of the step

The trainer waits for the slower of compute and claim. The ranks exchange whether they have their claim and whether a
stop was requested, and take the claim once every rank has it. If the queue has restarted the step meanwhile (groups of
it were lost, or one cannot be read), all ranks begin it anew. So they do without groups in which a rank finds a fault
(`checks/group_check.py`).

A step's first claim may come ahead, while the step before is computed, where a full claim is ready for each rank. The
step then begins before the report of the step before is answered. Behind that report the claim is requested again,
without its groups, and the queue counts them as claimed; a claim that does not stand any more restarts the step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from asyncrl.config.schema import Config
from asyncrl.device.turns import DeviceTurn
from asyncrl.errors import AsyncRLError, DeadlineError, RefusedError, StoppedError
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.checks.finite_check import NOT_FINITE
from asyncrl.learner.checks.group_check import CORRUPT, Fault, GroupCheck
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.group_wait import GroupWait
from asyncrl.learner.training import requirements
from asyncrl.queue.client.client import BlockingClient
from asyncrl.queue.protocol.replies import Claim, Trained
from asyncrl.telemetry import tracing
from asyncrl.telemetry.spans import Spans
from asyncrl.telemetry.status import UNDER_WAY, ProcessStatus
from asyncrl.types import TRAIN, Group, Version

log = logging.getLogger(__name__)

PARK_S = 0.5
"""Longest wait of one request: how soon a requested stop is noticed while nothing arrives."""

MOST_GROUPS = 1 << 31
"""More than a claim has: none of its groups are sent again."""

STOPPED = StoppedError.ended
"""Why the loop was left: a stop was requested."""

TOO_FLAT = (
    "nearly all groups have equal rewards: give tasks that are solved now and then, raise batch.group_size, "
    "or set algorithm.filter=none"
)


class Reported(NamedTuple):
    """counts: of the queue · seconds: until they came"""

    counts: Trained
    seconds: float


class Checked(NamedTuple):
    """A claim, if there is one yet, the faults of its groups, and these groups packed, if they have none."""

    claim: Claim | None = None
    faults: Sequence[Fault] = ()
    batch: MicroBatch | None = None


class LeaveLoop(Exception):  # noqa: N818  (a decision, not a failure)
    """All ranks leave the training loop, for `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StepRestarted(Exception):  # noqa: N818
    """The queue has restarted the step: the groups that were claimed for it no longer count."""


class GroupsRefused(Exception):  # noqa: N818
    """Claimed groups of the step have faults and were dropped: the step must begin anew. Raised on all ranks at once.

    faults: of all ranks, by ordinal · groups: those among them that this rank has claimed
    """

    def __init__(self, faults: Sequence[Fault], groups: Sequence[Group]) -> None:
        self.faults, self.groups = faults, groups
        super().__init__(
            f"{len(faults)} groups cannot be trained on; task {faults[0].ordinal}: {faults[0].text}"
        )


class NoGroups(DeadlineError):  # noqa: N818
    """No group came, and generators made no progress for `deadline_s`.

    Raised on all ranks at once, between two versions of the weights.
    """


class TrainStream:
    """Claims of this rank, and the reports of rank 0; on other ranks those do nothing.

    check  of every group that is claimed
    idle   called between waits
    turn   of this rank's device, which generators may want while it waits
    """

    def __init__(
        self,
        client: BlockingClient,
        backend: Backend,
        config: Config,
        spans: Spans,
        *,
        check: GroupCheck,
        learner_epoch: int,
        stop: threading.Event,
        idle: Callable[[], None],
        turn: DeviceTurn,
        status: ProcessStatus,
    ) -> None:
        self._check = check
        self._client, self._backend, self._spans, self._status = client, backend, spans, status
        self._learner_epoch, self._stop, self._idle, self._turn = learner_epoch, stop, idle, turn
        self._max_tokens = requirements.claim_tokens(config)
        self._in_order = config.queue.max_staleness == 0
        self._deadline_s = config.learner.groups_deadline_s
        self._versions = config.run.versions
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="claims")
        self._reports = ThreadPoolExecutor(1, thread_name_prefix="reports")
        self._report_under_way: Future[Reported] | None = None  # of rank 0
        self._attempt = 0  # of the step whose claims came last
        self._following: Callable[[], None] | None = None  # requests what follows the claim that was yielded
        # The requests of that claim once more, and of the one behind it.
        self._again: Future[Checked] = Future()
        self._next: Future[Checked] = Future()
        # A step whose first claim is wanted while the step before is computed, and the request.
        self._next_step = -1
        self._ahead: Future[Checked] | None = None

    def step(self, step: int) -> Iterator[tuple[list[Group], MicroBatch | None]]:
        """This rank's groups of a step, one list per claim, and the same packed (none if only other ranks have some).

        Raises:
            LeaveLoop: A stop was requested, or the task source has ended.
            StepRestarted: The step must begin anew.
            GroupsRefused: The same, without groups that have faults.
            NoGroups: None came, and generators made no progress for `deadline_s`. All ranks raise the same.
        """
        self._turn.offer()  # also if all claims are here already
        index, last = 0, False
        attempt: int | None = None
        request = self._first_request(step)
        while not last:
            waiting = self._status.waiting(
                f"a group for version {step + 1} from the generators", self._deadline_s
            )
            with self._spans("wait/groups"), waiting:
                claim, batch = self._agreed(request, step, index, attempt)
            last, attempt = claim.last, claim.attempt
            self._attempt = attempt
            _trace_claim(claim, step)
            self._following = partial(self._request_following, claim, step, index)
            yield claim.groups, batch
            self.go_on()
            if claim.ahead:
                with self._spans("wait/queue"):
                    self._agreed(self._again, step, 0, attempt, received=len(claim.groups))
            request, index = self._next, index + 1

    def go_on(self) -> None:
        """Request what follows the claim that `step` has yielded last, once: best as its computation begins, since the
        claims thread then takes no time from the trainer's."""
        following, self._following = self._following, None
        if following is not None:
            following()

    def _request_following(self, claim: Claim, step: int, index: int) -> None:
        if claim.ahead:
            self._again = self._request(step, 0, claim.attempt, received=len(claim.groups))
        if not claim.last:
            self._next = self._request(step, index + 1, claim.attempt)
        elif step + 1 < self._versions:
            self._request_ahead(step + 1)

    def report(self, step: int) -> Future[Reported] | None:
        """Begin to report a step as trained, which moves admission on. Returns the report of rank 0."""
        if self._backend.rank != 0:
            return None
        waited = self._spans.share("wait/groups")
        self._report_under_way = self._reports.submit(self._report, step, waited)
        return self._report_under_way

    def _report(self, step: int, waited: float) -> Reported:
        """In the reports thread."""
        began = time.monotonic()
        counts = self._client.trained(TRAIN, learner_epoch=self._learner_epoch, step=step, waited=waited)
        return Reported(counts, time.monotonic() - began)

    def leave_out(self, step: int, ordinals: Sequence[int]) -> None:
        """Collective: restart a step without these groups, which are not finite. Others replace them."""
        self._restart_without(step, self._attempt, ordinals, NOT_FINITE)

    def _restart_without(self, step: int, attempt: int, ordinals: Sequence[int], reason: str) -> None:
        if self._backend.rank == 0:
            self._make_first_claim(step, attempt)
            self._client.abandon(
                TRAIN,
                learner_epoch=self._learner_epoch,
                step=step,
                attempt=attempt,
                dropped=ordinals,
                reason=reason,
            )
        self._backend.exchange(None)  # no rank claims before the queue has restarted the step

    def _make_first_claim(self, step: int, attempt: int) -> None:
        """The queue may still be at the step before, if the claim came ahead."""
        if self._report_under_way is not None:
            self._report_under_way.result()
        with suppress(RefusedError):  # it has begun anew: to abandon the attempt changes nothing
            self._claim(step, 0, attempt, received=MOST_GROUPS)

    def reject(self, step: int) -> None:
        """Collective: drop all groups of a step, which is not finite. Others replace them."""
        if self._backend.rank == 0:
            self._client.reject(TRAIN, learner_epoch=self._learner_epoch, step=step, reason=NOT_FINITE)
        self._backend.exchange(None)

    def snapshot(self) -> bytes:
        """Where the stream stands, for a checkpoint."""
        if self._backend.rank != 0:
            return b""
        return self._client.snapshot(TRAIN, learner_epoch=self._learner_epoch)

    def checkpointed(self, version: Version) -> None:
        """Report a whole checkpoint: the queue may forget the steps before it."""
        if self._backend.rank == 0:
            self._client.checkpointed(TRAIN, learner_epoch=self._learner_epoch, version=version)

    def dropped(self) -> Mapping[str, int] | None:
        """Tasks dropped so far, by reason, including those after the last `trained`; None if unknown."""
        try:
            counts: Mapping[str, int] = self._client.status()["streams"][TRAIN]["dropped_by_reason"]
        except AsyncRLError as error:
            log.warning(
                "how many tasks were dropped is that of the last row: the queue does not say (%s)", error
            )
            return None
        return counts

    def close(self) -> None:
        self._next_step = -1
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._reports.shutdown(wait=True)

    def _request_ahead(self, step: int) -> None:
        self._next_step = step
        self._ahead = self._thread.submit(self._claim_ahead, step)

    def _claim_ahead(self, step: int) -> Checked:
        """In the claims thread: the first claim of the next step; without one if the trainer comes before it."""
        checked = self._claim(step, 0, None)
        while checked.claim is None and self._next_step == step and not self._stop.is_set():
            checked = self._claim(step, 0, None)
        return checked

    def _first_request(self, step: int) -> Future[Checked]:
        """The request that `_request_ahead` has made, once, if it was for this step."""
        ahead, self._ahead = self._ahead if self._next_step == step else None, None
        self._next_step = -1
        return self._request(step, 0, None) if ahead is None else ahead

    def _request(self, step: int, index: int, attempt: int | None, received: int = 0) -> Future[Checked]:
        return self._thread.submit(self._claim, step, index, attempt, received)

    def _claim(self, step: int, index: int, attempt: int | None, received: int = 0) -> Checked:
        """In the claims thread. attempt: none for a step's first claim, which may then come ahead."""
        claim = self._client.claim(
            TRAIN,
            learner_epoch=self._learner_epoch,
            step=step,
            index=index,
            rank=self._backend.data_rank,
            max_tokens=self._max_tokens,
            whole=self._in_order,
            wait_s=PARK_S,
            attempt=attempt,
            received=received,
            ahead=attempt is None,
        )
        if claim is None:
            return Checked()
        faults = self._faults(claim, step)
        return Checked(claim, faults, MicroBatch.of(claim.groups) if claim.groups and not faults else None)

    def _agreed(
        self, request: Future[Checked], step: int, index: int, attempt: int | None, received: int = 0
    ) -> tuple[Claim, MicroBatch | None]:
        """The claim, once every rank has its own, and its groups packed. A repeated request gets the same claim. It
        came ahead if that of any rank did."""
        wait = GroupWait(self._deadline_s, self._client.status, time.monotonic())
        (claim, faults, batch), refusal = self._result(request)
        while True:
            late = claim is None and wait.is_over(time.monotonic())
            claimed, ahead = (None, False) if claim is None else (claim.attempt, claim.ahead)
            every = self._backend.exchange([claimed, ahead, self._stop.is_set(), refusal, late, faults])
            attempts, aheads, stop, refusals, too_late, found = zip(*every, strict=True)
            if "abandoned" in refusals or len(set(attempts) - {None}) > 1:
                raise StepRestarted
            if claim is not None and None not in attempts:
                self._refuse(step, claim, {Fault(*fault) for theirs in found for fault in theirs})
                return replace(claim, ahead=any(aheads)), batch
            if "exhausted" in refusals:
                log.info("the task source has ended")
                raise LeaveLoop("exhausted")
            if any(stop):
                raise LeaveLoop(STOPPED)
            if any(too_late):
                who = f"learner rank {self._backend.rank}"
                what = f"a group for version {step + 1} (claim {index})"
                waited_s = time.monotonic() - wait.began
                raise NoGroups(who, "the generators", what, waited_s, self._task_counts())
            self._idle()
            if claim is None:
                repeated = self._request(step, index, attempt, received)
                (claim, faults, batch), refusal = self._result(repeated)

    def _result(self, request: Future[Checked]) -> tuple[Checked, str]:
        """(the claim if there is one, why there will be none)."""
        self._turn.offer_until(request)
        try:
            return request.result(), ""
        except RefusedError as refusal:
            if refusal.reason not in ("exhausted", "abandoned"):
                raise
            return Checked(), refusal.reason

    def _faults(self, claim: Claim, step: int) -> list[Fault]:
        """The faults of this rank's groups."""
        faults = []
        for group, worker in zip(claim.groups, claim.workers, strict=True):
            if fault := self._check.fault(group, step):
                faults.append(fault._replace(text=f"{fault.text} (made by {worker or 'an unknown worker'})"))
        return faults

    def _refuse(self, step: int, claim: Claim, faults: Collection[Fault]) -> None:
        """Collective: drop the groups with faults, if there are any, and raise GroupsRefused."""
        if not faults:
            return
        ordered = sorted(faults)
        if self._backend.rank == 0:
            for fault in ordered:
                log.error("the group of task %d is dropped as %s: %s", *fault)
        reason = CORRUPT if any(fault.reason == CORRUPT for fault in faults) else NOT_FINITE
        ordinals = sorted({fault.ordinal for fault in ordered if fault.reason == reason})
        self._restart_without(step, claim.attempt, ordinals, reason)
        mine = [group for group in claim.groups if group.task.ordinal in ordinals]
        raise GroupsRefused([fault for fault in ordered if fault.reason == reason], mine)

    def _task_counts(self) -> str:
        """The queue's counts of the stream's tasks, for the error after a long wait."""
        try:
            status = self._client.status()
            return _counts_text(status["streams"][TRAIN]) + _calls_under_way(status["workers"])
        except AsyncRLError as error:
            return f"the queue does not say why ({error})"


def _trace_claim(claim: Claim, step: int) -> None:
    """An event with the tasks of this rank's groups, and the number of these by their age in versions."""
    if tracing.current() is None:
        return
    ages = Counter(str(step - group.start_version) for group in claim.groups)
    tasks = [group.task.ordinal for group in claim.groups]
    tracing.event("claim", version=step, groups=len(tasks), ages=ages, last=claim.last, tasks=tasks)


def _counts_text(counts: Mapping[str, Any]) -> str:
    """The queue's counts of a stream, with a hint where most tasks were dropped for one common reason."""
    places = ", ".join(f"{counts[place]} {place}" for place in ("pending", "leased", "ready", "trained"))
    reasons = sorted(counts["dropped_by_reason"].items(), key=lambda entry: -entry[1])
    dropped = ", ".join(f"{count} {reason}" for reason, count in reasons)
    text = f"tasks: {places}; dropped: {dropped or 'none'}"
    stages = counts.get("stages", {}).items()
    waiting = [f"{stage['waiting'] + stage['leased']} {name}" for name, stage in stages]
    text += f"; groups that wait for a pool: {', '.join(waiting)}" if waiting else ""
    return f"{text}; {TOO_FLAT}" if reasons and reasons[0][0] == "filtered" else text


def _calls_under_way(workers: Mapping[str, Mapping[str, Any]]) -> str:
    """The reward functions that generators and pools wait for, by their last reports."""
    calls = Counter[str]()
    for stats in workers.values():
        calls.update(
            {name.removeprefix(UNDER_WAY): n for name, n in stats.items() if name.startswith(UNDER_WAY) and n}
        )
    named = ", ".join(f"{count} of {function}" for function, count in calls.most_common())
    return f"; reward calls under way: {named}" if named else ""
