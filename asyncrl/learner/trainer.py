"""The learner's loop.

        startup.py: open the streams, restore, publish the first version
                              │
       ┌──────────────────────▼───────────────────────┐
       │  groups of step k         ◂── queue          │  waits for generators, groups_deadline_s at most
       │     forward, backward, as they arrive,       │  works while the next claim is on its way
       │     or once all are in   (version_step.py)   │
       │     metrics row of version k                 │  behind the first passes, or at once if no claim is there
       │  optimizer steps          ── all ranks ──    │  waits for the slowest rank
       │  publish version k+1      ──▸ weight stream  │  waits for a copy of its shards, never for a generator
       │  report step k            ──▸ queue          │  admission moves on: generators may lease again
       │  evaluation, checkpoint                      │  polls evaluations, waits for the disk
       └──────────────────────┬───────────────────────┘
                              │ last version · target reached · no more tasks · stop requested
        last evaluation, checkpoint, export, summary, finish

Rank 0 alone reports to the queue, evaluates and writes rows; its decisions reach the other ranks through
`backend.exchange`, so that all of them leave the loop at the same step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.config.schema import Config, LearnerConfig
from asyncrl.device.turns import DeviceTurn
from asyncrl.errors import StoppedError, TrainingError
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.checks.finite_check import NOT_FINITE, NonFiniteGroups
from asyncrl.learner.publication import Publication
from asyncrl.learner.remote.remote_model import RemoteModel
from asyncrl.learner.reporting.evaluation import EvaluationSchedule
from asyncrl.learner.reporting.report import RunRecords
from asyncrl.learner.reporting.rollout_log import GROUPS, due
from asyncrl.learner.reporting.saved_groups import KeptGroups
from asyncrl.learner.reporting.version_decisions import VersionDecisions
from asyncrl.learner.train_stream import (
    STOPPED,
    GroupsRefused,
    LeaveLoop,
    NoGroups,
    Reported,
    StepRestarted,
    TrainStream,
)
from asyncrl.learner.training import requirements
from asyncrl.learner.training.version_step import VersionReport, VersionStep
from asyncrl.queue.client.client import BlockingClient
from asyncrl.telemetry import tracing
from asyncrl.telemetry.spans import Spans
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import Array, Group, Version

log = logging.getLogger(__name__)

MAX_BAD_STEPS = 3
"""Refused steps in a row that end the run even under `on_bad_step: skip`."""

MAX_BAD_BATCHES = 3
"""Restarts of a version that end the run even under `on_bad_batch: skip`: its model is broken then, not its groups."""

MAX_REFUSED = 100
"""Claims of one version whose groups have faults, after which the run ends: all generators make such groups then."""


LAST_ROW_S = 5.0
"""How long a run that ends on an error waits for the answer to its last report."""


class UnwrittenRow(NamedTuple):
    """The metrics row of a version, until the report of its step is answered.

    time: when it was published · values: so far · spans: seconds of the version · rollouts, logprobs: for the rollout
    log
    """

    version: Version
    time: float
    report: Future[Reported]
    values: Mapping[str, float]
    spans: Mapping[str, float]
    rollouts: Sequence[Group]
    logprobs: Sequence[Array]


@dataclass
class Trainer:
    """One rank of the learner, with everything open (`startup.open_trainer`).

    version  of the policy now, published
    turn     of this rank's device, which generators may want while it waits
    stop     set from any thread or signal handler: the version under way is finished if its optimizer steps have begun,
             and abandoned otherwise; then a checkpoint is written and the loop ends
    """

    config: Config
    backend: Backend
    client: BlockingClient
    version: Version
    version_step: VersionStep
    stream: TrainStream
    publication: Publication
    checkpoints: Checkpoints
    evaluations: EvaluationSchedule
    records: RunRecords
    kept_groups: KeptGroups
    decisions: VersionDecisions
    failures: FailurePolicy
    remote_models: Mapping[str, RemoteModel]
    status: ProcessStatus
    spans: Spans
    stop: threading.Event
    turn: DeviceTurn
    row: UnwrittenRow | None = None

    def run(self) -> None:
        """Train to the last version, the target accuracy, or the requested stop.

        Raises:
            StoppedError: After a requested stop, once a checkpoint is written.
            DeadlineError: When no group comes, once a checkpoint is written.
            TrainingError: For values that are not finite, see `FailurePolicy`.
        """
        try:
            self.evaluations.start_if_due(self.version)
            reason = ""
            while not reason and self.version < self.config.run.versions:
                reason = self._agreed_reason_to_leave() or self._train_version()
            self._finish(reason)
        except Exception:
            self._rescue_row()
            self.checkpoints.rescue()
            raise
        finally:
            self._close()
        if reason == STOPPED:
            raise StoppedError(f"stopped at version {self.version}, which is saved; run.resume=true goes on")

    def _train_version(self) -> str:
        """Train version k on its groups and publish k + 1. Returns why to leave the loop; empty to go on."""
        self.records.profile.begin(self.version + 1)
        try:
            some = self._take_groups()
            logged = due(self.version + 1, self.config)
            logprobs = self.version_step.logprobs(some) if logged else []
            report = self.version_step.step(self.version)
        except NonFiniteGroups as bad:
            self.version_step.abandon()
            self.kept_groups.save_bad(bad.ordinals)
            self.failures.leave_out(bad, self.version)
            return ""
        except GroupsRefused as refused:
            self.version_step.abandon()
            self.kept_groups.save(refused.groups)
            self.failures.note_refused(refused, self.version)
            return ""
        except LeaveLoop as leave:
            self.version_step.abandon()
            return leave.reason
        except StepRestarted:
            self.version_step.abandon()
            log.warning("the queue took the step of version %d apart: it begins anew", self.version)
            return ""
        except NoGroups:
            self.version_step.abandon()
            self._checkpoint()
            raise
        self.decisions.write(self.version + 1, bool(report.refused), report.values)
        if report.refused:
            self.failures.refuse_step(report.refused, self.version)
        else:
            self._publish(report, some if logged else [], logprobs)
            self.evaluations.start_if_due(self.version)
            if self.checkpoints.is_due(self.version):
                self._write_row()  # its step must be trained, for the queue too
                self.checkpoints.save(self.version, self._coefficients())
        return ""

    def _take_groups(self) -> list[Group]:
        """Hand the step's groups to the version step as they arrive. Returns some of them, for the rollout log."""
        some: list[Group] = []
        self.kept_groups.begin(self.version + 1)
        self.decisions.begin()
        for groups, prepared in self.stream.step(self.version):
            self._hold_device()
            self.kept_groups.add(groups)
            self.decisions.add(groups)
            self.version_step.add(groups, self.version, prepared, begun=self.stream.request_following)
            self.kept_groups.forget_before()
            self._write_row()
            some += groups[: GROUPS - len(some)]
        if requirements.whole_batch(self.config) and (reason := self._agreed_reason_to_leave()):
            raise LeaveLoop(reason)  # nearly all work of this version is still to come
        return some

    def _publish(self, report: VersionReport, rollouts: list[Group], logprobs: list[Array]) -> None:
        """Publish version k + 1, and begin to report step k as trained."""
        with self.spans("wait/publish"):
            self.publication.publish(self.version + 1)
        tracing.event("published", version=self.version + 1)
        report_of_step = self.stream.report(self.version)
        with self.spans("wait/ranks"):
            readings = self.backend.exchange(self.records.utilization.reading())
        self.version += 1
        self.publication.note_probes(self.version)
        values = {**report.values, "train/groups_not_finite": self.failures.version_trained()}
        if report_of_step is not None:
            spans = self.spans.take()
            values |= self.records.utilization.values(report.values, spans, readings)
            now = self.records.now()
            self.row = UnwrittenRow(self.version, now, report_of_step, values, spans, rollouts, logprobs)
            if not self.stream.has_first_claim:  # generators have to make it first
                self._write_row()

    def _write_row(self) -> None:
        """Write the metrics row of the version that was published last, if it is not written yet."""
        row, self.row = self.row, None
        if row is None:
            return
        with self.spans("wait/queue"):
            trained, report_s = row.report.result()
        values = {**row.values, **self.publication.values(trained.stats), "queue/report_ms": 1e3 * report_s}
        self.status.figures = self.records.write_version(row.version, trained, values, row.spans, row.time)
        self.records.write_rollouts(row.version, row.rollouts, row.logprobs)

    def _rescue_row(self) -> None:
        """Before the run ends on an error, which counts more than one of this row."""
        if self.row is not None and wait([self.row.report], LAST_ROW_S).done:
            with suppress(Exception):
                self._write_row()

    def _agreed_reason_to_leave(self) -> str:
        """Why all ranks leave the loop now; empty to go on. A checkpoint that all have written is completed."""
        reason = STOPPED if self.stop.is_set() else "target" if self.evaluations.target_reached else ""
        with self.spans("wait/ranks"):
            every = self.backend.exchange([reason, self.checkpoints.state])
        reasons, states = zip(*every, strict=True)
        self.checkpoints.settle(states)
        return next((reason for reason in reasons if reason), "")

    def _finish(self, reason: str) -> None:
        """A requested stop leaves out the last evaluation and the export, which take long."""
        self.stream.leave()
        if reason != STOPPED:
            self.evaluations.start_if_due(self.version, last=True)
        self._checkpoint()
        if reason != STOPPED:
            with tracing.span("disk", "export", version=self.version):
                self.backend.export_hf(self.records.folder / "final")
            self.evaluations.finish(self.backend, self.status, self.stop.is_set, self.turn.offer)
        else:
            self.evaluations.write_rest()
        if self.backend.rank == 0:
            self.records.write_summary(reason or "done", self.stream.dropped())
            self.client.finish(reason or "done")
        self.backend.exchange(None)

    def _hold_device(self) -> None:
        with self.spans("wait/device"):
            self.turn.hold()

    def _checkpoint(self) -> None:
        self._write_row()
        self._hold_device()
        self.checkpoints.save(self.version, self._coefficients())
        self.checkpoints.finish()

    def _coefficients(self) -> dict[str, float]:
        return self.version_step.controls.adapted(self.config.algorithm)

    def _close(self) -> None:
        self.stream.close()
        self.publication.close()
        self.records.close()
        for model in self.remote_models.values():
            model.close()


class FailurePolicy:
    """`learner.on_bad_batch` and `learner.on_bad_step`: stop the run, or train the version again on other groups.

    Counts failures in a row. Collective: every method.
    """

    def __init__(self, config: LearnerConfig, stream: TrainStream) -> None:
        self._config, self._stream = config, stream
        self._bad_steps = self._bad_batches = self._refused = self._left_out = 0

    def note_refused(self, refused: GroupsRefused, version: Version) -> None:
        """Groups with faults were dropped, and the version begins anew. Raises TrainingError if that never ends."""
        self._refused += 1
        if self._refused >= MAX_REFUSED:
            raise TrainingError(
                f"for version {version} {refused}. This is claim number {self._refused} in a row with such groups: "
                "the generators or pools run with another model, code or configuration than the learner"
            )
        self._left_out += len({fault.ordinal for fault in refused.faults if fault.reason == NOT_FINITE})

    def leave_out(self, bad: NonFiniteGroups, version: Version) -> None:
        """Restart the version without its bad groups; nothing has moved. Raises TrainingError under `on_bad_batch:
        stop`, or after too many failures in a row."""
        self._bad_batches += 1
        stop = self._config.on_bad_batch == "stop"
        if stop or self._bad_batches >= MAX_BAD_BATCHES:
            remedy = ", or set learner.on_bad_batch=skip to train without them" if stop else ""
            raise TrainingError(
                f"for version {version} {bad}; finding number {self._bad_batches} for it. Nothing has moved: "
                f"look at these tasks and their rewards{remedy}"
            )
        log.warning("for version %d %s: it is begun anew without them", version, bad)
        self._left_out += len(bad.ordinals)
        self._stream.leave_out(version, bad.ordinals)

    def refuse_step(self, reason: str, version: Version) -> None:
        """Drop the groups of a version because an optimizer step was not finite. The step has moved no model; earlier
        optimizer steps of the version stand. Raises TrainingError under `on_bad_step: stop`, or after too many failures
        in a row."""
        self._bad_steps += 1
        failure = f"the step from version {version} has {reason}"
        if self._config.on_bad_step == "stop" or self._bad_steps >= MAX_BAD_STEPS:
            raise TrainingError(
                f"{failure}, step number {self._bad_steps} in a row that failed so; "
                "that step moved nothing, earlier steps of this version stand"
            )
        log.warning("%s: its groups are dropped", failure)
        self._stream.reject(version)

    def version_trained(self) -> int:
        """End a row of failures. Returns how many groups were left out since the last version."""
        left_out = self._left_out
        self._bad_steps = self._bad_batches = self._refused = self._left_out = 0
        return left_out
