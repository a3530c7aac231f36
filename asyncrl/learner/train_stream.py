"""The train stream of one learner rank: the groups of each step, as they arrive, and reports about the step.

    trainer thread      ─ claim 0 ─┬─ compute 0 ──┬─ claim 1 ready? ─┬─ compute 1 ── …  until the `last` one
                                   │              │                  │
    claims thread                  └─▸ claim 1 ───┘                  └─▸ claim 2
                                        waits in the broker until a group is ready, then its groups are checked

The trainer waits for the slower of compute and claim. Each rank requests the first claim of the next step once it has
published its version, rank 0 once its report of the step is answered: both in the claims thread, while the ranks
exchange readings, the probes are computed and the version is recorded. The ranks exchange whether they have their claim
and whether a stop was requested, and take the claim once every rank has it. If the queue has restarted the step
meanwhile (groups of it were lost, or one cannot be read), all ranks begin it anew. So they do without groups in which a
rank finds a fault (`checks/group_check.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from asyncrl.config.schema import Config
from asyncrl.device.turns import DeviceTurn
from asyncrl.errors import AsyncRLError, DeadlineError, RefusedError, StoppedError
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.checks.finite_check import NOT_FINITE
from asyncrl.learner.checks.group_check import CORRUPT, Fault, GroupCheck
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
    """A claim, if there is one yet, and the faults of its groups."""

    claim: Claim | None
    faults: list[Fault]


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
        self._attempt = 0  # of the step whose claims came last
        # A step, and the request of its first claim.
        self._ahead: tuple[int, Future[Checked]] | None = None

    def step(self, step: int) -> Iterator[list[Group]]:
        """This rank's groups of a step, one list per claim (empty if only other ranks have some).

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
                claim = self._agreed(request, step, index, attempt)
            last, index, attempt = claim.last, index + 1, claim.attempt
            self._attempt = attempt
            _trace_claim(claim, step)
            if not last:
                request = self._request(step, index, attempt)
            yield claim.groups

    def report(self, step: int) -> Future[Reported] | None:
        """Begin to report a step as trained, which moves admission on, and then to request the next one's first claim.
        Returns the report of rank 0."""
        report: Future[Reported] | None = None
        if self._backend.rank == 0:
            report = self._thread.submit(self._report, step, self._spans.share("wait/groups"))
        if step + 1 < self._versions:  # on other ranks it may wait in the queue for the report of rank 0
            self._ahead = step + 1, self._thread.submit(self._claim_behind, report, step + 1)
        return report

    def _report(self, step: int, waited: float) -> Reported:
        """In the claims thread."""
        began = time.monotonic()
        counts = self._client.trained(TRAIN, learner_epoch=self._learner_epoch, step=step, waited=waited)
        return Reported(counts, time.monotonic() - began)

    def _claim_behind(self, report: Future[Reported] | None, step: int) -> Checked:
        """In the claims thread, which has made the report before. If that failed, no claim is sent."""
        if report is not None:
            report.result()
        return self._claim(step, 0, None)

    def leave_out(self, step: int, ordinals: Sequence[int]) -> None:
        """Collective: restart a step without these groups, which are not finite. Others replace them."""
        self._restart_without(step, self._attempt, ordinals, NOT_FINITE)

    def _restart_without(self, step: int, attempt: int, ordinals: Sequence[int], reason: str) -> None:
        if self._backend.rank == 0:
            self._client.abandon(
                TRAIN,
                learner_epoch=self._learner_epoch,
                step=step,
                attempt=attempt,
                dropped=ordinals,
                reason=reason,
            )
        self._backend.exchange(None)  # no rank claims before the queue has restarted the step

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
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _first_request(self, step: int) -> Future[Checked]:
        """The request that `report` has made, once, if it was for this step."""
        ahead, self._ahead = self._ahead, None
        return ahead[1] if ahead is not None and ahead[0] == step else self._request(step, 0, None)

    def _request(self, step: int, index: int, attempt: int | None) -> Future[Checked]:
        return self._thread.submit(self._claim, step, index, attempt)

    def _claim(self, step: int, index: int, attempt: int | None) -> Checked:
        """In the claims thread."""
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
        )
        return Checked(claim, [] if claim is None else self._faults(claim, step))

    def _agreed(self, request: Future[Checked], step: int, index: int, attempt: int | None) -> Claim:
        """The claim, once every rank has its own. A repeated request gets the same claim."""
        wait = GroupWait(self._deadline_s, self._client.status, time.monotonic())
        (claim, faults), refusal = self._result(request)
        while True:
            late = claim is None and wait.is_over(time.monotonic())
            claimed = None if claim is None else claim.attempt
            every = self._backend.exchange([claimed, self._stop.is_set(), refusal, late, faults])
            attempts, stop, refusals, too_late, found = zip(*every, strict=True)
            if "abandoned" in refusals or len(set(attempts) - {None}) > 1:
                raise StepRestarted
            if claim is not None and None not in attempts:
                self._refuse(step, claim, {Fault(*fault) for theirs in found for fault in theirs})
                return claim
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
                (claim, faults), refusal = self._result(self._request(step, index, attempt))

    def _result(self, request: Future[Checked]) -> tuple[Checked, str]:
        """(the claim if there is one, why there will be none)."""
        self._turn.offer_until(request)
        try:
            return request.result(), ""
        except RefusedError as refusal:
            if refusal.reason not in ("exhausted", "abandoned"):
                raise
            return Checked(None, []), refusal.reason

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
