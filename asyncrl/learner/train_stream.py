"""The train stream of one learner rank: the groups of each step, as they arrive, and reports about the step.

    trainer thread      ─ claim 0 ─┬─ compute 0 ──┬─ claim 1 there? ─┬─ compute 1, the last ─┬─ publish ─┬─ compute 0 ─
                                   │              │                  │                       │           │
    claims thread                  └─▸ claim 1 ───┘                  └─▸ claim 0, ahead ───────────────▸ └─▸ again
                                        waits in the broker until a group is ready;          │
                                        its groups are checked and prepared                  │
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
from typing import NamedTuple

from asyncrl.config.schema import Config
from asyncrl.device.turns import DeviceTurn
from asyncrl.errors import AsyncRLError, DeadlineError, RefusedError, StoppedError, TrainingError
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.checks.finite_check import NOT_FINITE
from asyncrl.learner.checks.group_check import CORRUPT, Fault, GroupCheck
from asyncrl.learner.group_wait import GroupWait
from asyncrl.learner.training import requirements
from asyncrl.learner.training.version_step import PreparedClaim
from asyncrl.queue.client.client import BlockingClient
from asyncrl.queue.protocol.replies import Claim, Trained
from asyncrl.telemetry import tracing
from asyncrl.telemetry.spans import Spans
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import TRAIN, Group, Version

log = logging.getLogger(__name__)

PARK_S = 0.5
"""Longest wait of one request: how soon a requested stop is noticed while nothing arrives."""

STOPPED = StoppedError.ended
"""Why the loop was left: a stop was requested."""


class Reported(NamedTuple):
    """counts: of the queue · seconds: until they came"""

    counts: Trained
    seconds: float


class Checked(NamedTuple):
    """A claim, if there is one yet, the faults of its groups, and these groups prepared, if that was possible."""

    claim: Claim | None = None
    faults: Sequence[Fault] = ()
    prepared: PreparedClaim | None = None


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

    check    of every group that is claimed
    prepare  the groups of a claim for the step, in the claims thread
    idle     called between waits
    turn     of this rank's device, which generators may want while it waits
    """

    def __init__(
        self,
        client: BlockingClient,
        backend: Backend,
        config: Config,
        spans: Spans,
        *,
        check: GroupCheck,
        prepare: Callable[[Sequence[Group], Version], PreparedClaim],
        learner_epoch: int,
        stop: threading.Event,
        idle: Callable[[], None],
        turn: DeviceTurn,
        status: ProcessStatus,
    ) -> None:
        self._check, self._prepare = check, prepare
        self._client, self._backend, self._spans, self._status = client, backend, spans, status
        self._learner_epoch, self._stop, self._idle, self._turn = learner_epoch, stop, idle, turn
        self._max_tokens = requirements.claim_tokens(config)
        self._in_order = config.queue.max_staleness == 0
        self._deadline_s, self._queue_s = config.learner.groups_deadline_s, config.queue.deadline_s
        self._versions = config.run.versions
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="claims")
        self._reports = ThreadPoolExecutor(1, thread_name_prefix="reports")
        self._under_way: Future[Reported] | None = None  # the last report of rank 0
        self._round = 0  # of beginnings of a step: requests of an earlier round are given up
        # A later step, and the request of its first claim.
        self._ahead: tuple[int, Future[Checked]] | None = None
        self._attempt = 0  # of the step whose claims came last
        self._unconfirmed: Claim | None = None  # came ahead, and was not requested again yet
        # The claim that was yielded last (claim, step, index), until what follows it is requested: the same once more,
        # if it came ahead, and the next one, if it is not the last.
        self._yielded: tuple[Claim, int, int] | None = None
        self._confirmation: Future[None] | None = None
        self._next: Future[Checked] | None = None

    def step(self, step: int) -> Iterator[tuple[list[Group], PreparedClaim | None]]:
        """This rank's groups of a step, one list per claim, and the same prepared, if it has some and nothing is amiss.

        Raises:
            LeaveLoop: A stop was requested, or the task source has ended.
            StepRestarted: The step must begin anew.
            GroupsRefused: The same, without groups that have faults.
            NoGroups: None came, and generators made no progress for `deadline_s`. All ranks raise the same.
        """
        self._turn.offer()  # also if all claims are here already
        index, attempt = 0, None
        request: Future[Checked] | None = self._first_request(step)
        while request is not None:
            waiting = self._status.waiting(
                f"a group for version {step + 1} from the generators", self._deadline_s
            )
            with self._spans("wait/groups"), waiting:
                claim, prepared = self._agreed(request, step, index, attempt)
            self._attempt = attempt = claim.attempt
            _trace_claim(claim, step)
            self._yielded = claim, step, index
            yield claim.groups, prepared
            self.request_following()
            self._confirm(step)
            request, index = self._next, index + 1

    def request_following(self) -> None:
        """Request what follows the claim that `step` has yielded last, once: best as its computation begins, since the
        claims thread then takes no time from the trainer's."""
        if self._yielded is None:
            return
        (claim, step, index), self._yielded = self._yielded, None
        if claim.ahead:
            self._confirmation = self._thread.submit(self._claim_again, claim, step, self._round)
        self._next = None if claim.last else self._request(step, index + 1, claim.attempt)
        if claim.last and step + 1 < self._versions:
            self._ahead = step + 1, self._thread.submit(self._claim_ahead, step + 1, self._round)

    @property
    def has_first_claim(self) -> bool:
        """Whether the first claim of the next step has come ahead."""
        if self._ahead is None or not (request := self._ahead[1]).done() or request.exception() is not None:
            return False
        claim = request.result().claim
        return claim is not None and claim.ahead

    def report(self, step: int) -> Future[Reported] | None:
        """Begin to report a step as trained, which moves admission on. Returns the report of rank 0."""
        if self._backend.rank != 0:
            return None
        self._under_way = self._reports.submit(self._report, step, self._spans.share("wait/groups"))
        return self._under_way

    def _report(self, step: int, waited: float) -> Reported:
        """In the reports thread."""
        began = time.monotonic()
        counts = self._client.trained(TRAIN, learner_epoch=self._learner_epoch, step=step, waited=waited)
        return Reported(counts, time.monotonic() - began)

    def _require_reported(self) -> None:
        """Raise the error of a report that failed: the queue runs no further step then."""
        if self._under_way is not None and self._under_way.done():
            self._under_way.result()

    def leave_out(self, step: int, ordinals: Sequence[int]) -> None:
        """Collective: restart a step without these groups, which are not finite. Others replace them."""
        self._restart_without(step, self._attempt, ordinals, NOT_FINITE)

    def _restart_without(self, step: int, attempt: int, ordinals: Sequence[int], reason: str) -> None:
        if self._backend.rank == 0 and self._stands(step):
            self._client.abandon(
                TRAIN,
                learner_epoch=self._learner_epoch,
                step=step,
                attempt=attempt,
                dropped=ordinals,
                reason=reason,
            )
        self._backend.exchange(None)  # no rank claims before the queue has restarted the step

    def _stands(self, step: int) -> bool:
        """Whether the running step's first claim is one that the queue counts, also if it came ahead."""
        if self._unconfirmed is None:
            return True
        try:
            self._claim_again(self._unconfirmed, step, self._round)
        except RefusedError as refusal:
            _reason(refusal, "abandoned")
            return False
        return True

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

    def leave(self) -> None:
        """No further step is wanted."""
        self._round += 1

    def close(self) -> None:
        self.leave()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._reports.shutdown(wait=True)

    # ------------------------------------------------------------------ in the claims thread

    def _claim(self, step: int, index: int, attempt: int | None, ahead: bool = False) -> Checked:
        claim = self._requested(step, index, attempt, ahead=ahead)
        if claim is None:
            return Checked()
        faults = self._faults(claim, step)
        prepared = None
        if claim.groups and not faults:
            # The trainer's thread raises it too, once all ranks have their claims.
            with suppress(TrainingError):
                prepared = self._prepare(claim.groups, step)
        return Checked(claim, faults, prepared)

    def _claim_ahead(self, step: int, round_: int) -> Checked:
        """The first claim of the next step; without one if the trainer comes before it, or it cannot be read."""
        while True:
            try:
                checked = self._claim(step, 0, None, ahead=True)
            except RefusedError as refusal:
                _reason(refusal, "abandoned")
                return Checked()
            except DeadlineError:  # nobody needs the queue yet
                return Checked()
            if checked.claim is not None or self._round != round_ or self._stop.is_set():
                return checked

    def _claim_again(self, claim: Claim, step: int, round_: int) -> None:
        """Request a claim that came ahead, without its groups, until the queue runs the step and counts it.

        Raises:
            RefusedError: 'abandoned', it does not stand any more.
            DeadlineError: The queue does not run the step after `queue.deadline_s`.
        """
        mine, began = [group.task.ordinal for group in claim.groups], time.monotonic()
        while self._round == round_:
            again = self._requested(step, 0, claim.attempt, received=len(mine))
            if again is not None:
                if list(again.ordinals) != mine:
                    raise RefusedError("abandoned", f"step {step} has begun with other groups")
                return
            self._require_reported()
            waited_s = time.monotonic() - began
            if waited_s > self._queue_s:
                what = f"the first claim of step {step}, once more,"
                raise DeadlineError(f"learner rank {self._backend.rank}", "the queue", what, waited_s)

    def _requested(
        self, step: int, index: int, attempt: int | None, received: int = 0, ahead: bool = False
    ) -> Claim | None:
        return self._client.claim(
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
            ahead=ahead,
        )

    # ------------------------------------------------------------------ in the trainer's thread

    def _first_request(self, step: int) -> Future[Checked]:
        """The request that was made ahead, once, if it was for this step. A new round."""
        self._round += 1
        self._unconfirmed = self._confirmation = None
        ahead, self._ahead = self._ahead, None
        return ahead[1] if ahead is not None and ahead[0] == step else self._request(step, 0, None)

    def _request(self, step: int, index: int, attempt: int | None) -> Future[Checked]:
        return self._thread.submit(self._claim, step, index, attempt)

    def _confirm(self, step: int) -> None:
        """Collective, if the claim came ahead: raise StepRestarted unless it stands for every rank."""
        confirmation, self._confirmation = self._confirmation, None
        if confirmation is None:
            return
        refusal, waiting = "", self._status.waiting("the queue, for a claim that came ahead", self._queue_s)
        with self._spans("wait/queue"), waiting:
            try:
                confirmation.result()
            except RefusedError as refused:
                refusal = _reason(refused, "abandoned")
            every = self._backend.exchange(refusal)
        if any(every):
            raise StepRestarted
        self._unconfirmed = None

    def _agreed(
        self, request: Future[Checked], step: int, index: int, attempt: int | None
    ) -> tuple[Claim, PreparedClaim | None]:
        """The claim, once every rank has its own, and its groups prepared. A repeated request gets the same claim. It
        came ahead if that of any rank did."""
        wait = GroupWait(self._deadline_s, self._client.status, time.monotonic())
        (claim, faults, prepared), refusal = self._result(request)
        while True:
            late = claim is None and wait.is_over(time.monotonic())
            claimed, ahead = (None, False) if claim is None else (claim.attempt, claim.ahead)
            every = self._backend.exchange([claimed, ahead, self._stop.is_set(), refusal, late, faults])
            attempts, aheads, stop, refusals, too_late, found = zip(*every, strict=True)
            if "abandoned" in refusals or len(set(attempts) - {None}) > 1:
                raise StepRestarted
            if claim is not None and None not in attempts:
                claim = replace(claim, ahead=any(aheads))
                self._unconfirmed = claim if claim.ahead else self._unconfirmed
                self._refuse(step, claim, {Fault(*fault) for theirs in found for fault in theirs})
                return claim, prepared
            if "exhausted" in refusals:
                log.info("the task source has ended")
                raise LeaveLoop("exhausted")
            if any(stop):
                raise LeaveLoop(STOPPED)
            if any(too_late):
                who = f"learner rank {self._backend.rank}"
                what = f"a group for version {step + 1} (claim {index})"
                waited_s = time.monotonic() - wait.began
                raise NoGroups(who, "the generators", what, waited_s, wait.task_counts())
            self._require_reported()
            self._idle()
            if claim is None:
                (claim, faults, prepared), refusal = self._result(self._request(step, index, attempt))

    def _result(self, request: Future[Checked]) -> tuple[Checked, str]:
        """(the claim if there is one, why there will be none)."""
        self._turn.offer_until(request)
        try:
            return request.result(), ""
        except RefusedError as refusal:
            return Checked(), _reason(refusal, "exhausted", "abandoned")

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


def _reason(refusal: RefusedError, *expected: str) -> str:
    """The reason of a refusal; raises it unless that is expected."""
    if refusal.reason not in expected:
        raise refusal
    return refusal.reason


def _trace_claim(claim: Claim, step: int) -> None:
    """An event with the tasks of this rank's groups, and the number of these by their age in versions."""
    if tracing.current() is None:
        return
    ages = Counter(str(step - group.start_version) for group in claim.groups)
    tasks = [group.task.ordinal for group in claim.groups]
    tracing.event("claim", version=step, groups=len(tasks), ages=ages, last=claim.last, tasks=tasks)
