"""The loop of an offline job. It is the learner's step, without a queue before it and generators behind it.

       ┌──────────────────────────────────────────────┐
       │  rows of step k      ──▸ examples, packed    │  each rank reads its own
       │     forward, backward    (accumulator.py)    │
       │  optimizer step          ── all ranks ──     │  waits for the slowest rank
       │  metrics row, held-out tasks, checkpoint     │  waits for the disk
       └──────────────────────┬───────────────────────┘
                              │ last step · target reached · no more rows · stop requested
        last look at the held-out tasks, checkpoint, export, summary

Version k is the model after k optimizer steps.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.errors import StoppedError, TrainingError
from asyncrl.learner.algorithms.roles import POLICY
from asyncrl.learner.backends.backend import Backend, exchange_per_data_rank
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.checks.finite_check import SHOWN, NonFiniteGroups
from asyncrl.learner.reporting.heldout import ACCURACY
from asyncrl.learner.reporting.report import RunRecords, step_row
from asyncrl.learner.train_stream import STOPPED
from asyncrl.learner.training.accumulator import Accumulator, OptimizerStep
from asyncrl.offline.batches import Batches, StepBatch
from asyncrl.offline.heldout import Answers, HeldOutLoss
from asyncrl.telemetry import tracing
from asyncrl.telemetry.metrics import Metrics, Sum
from asyncrl.telemetry.spans import Spans
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import Version


@dataclass
class OfflineTrainer:
    """One rank of a job, with everything open.

    every, output, until_accuracy: of the job's section · stop: set from any thread or signal handler
    """

    config: Config
    backend: Backend
    batches: Batches
    accumulator: Accumulator
    heldout: HeldOutLoss
    answers: Answers | None
    checkpoints: Checkpoints
    records: RunRecords
    status: ProcessStatus
    spans: Spans
    stop: threading.Event
    every: int
    output: Path
    until_accuracy: float | None
    version: Version
    scores: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        """Raises StoppedError after a requested stop, once a checkpoint is written, and TrainingError for values that
        are not finite."""
        reason = ""
        try:
            while not reason and self.version < self.config.run.versions:
                reason = self._agreed_reason_to_leave() or self._train_step()
            self._finish(reason or "done")
        except Exception:
            self.checkpoints.rescue()
            raise
        finally:
            self.records.close()
        if reason == STOPPED:
            raise StoppedError(f"stopped at step {self.version}, which is saved; run.resume=true goes on")

    def _train_step(self) -> str:
        """Returns why to leave the loop; empty to go on."""
        with self.spans("compute/pack"):
            taken = self.batches.step(self.version)
        with self.spans("wait/ranks"):
            none = not any(self.backend.exchange(taken.batch is not None or taken.left_out > 0))
        if none and taken.ended:
            return "no more tasks"
        try:
            self.accumulator.add(taken.batch, self.version)
            step = self.accumulator.step(self.version)
        except NonFiniteGroups as bad:
            where = ", ".join(self.batches.stream.place_of(ordinal) for ordinal in bad.ordinals[:SHOWN])
            raise TrainingError(
                f"step {self.version}: the outputs or the loss are not finite: {where}"
            ) from bad
        if step.refused:
            remedy = "nothing has moved; try a smaller optimizer.lr"
            raise TrainingError(f"step {self.version}: gradient norm {step.norms[POLICY]}; {remedy}")
        self.version += 1
        self._write_row(step, taken)
        reached = self._look_at_held_out() if self.version % self.every == 0 else False
        if self.checkpoints.is_due(self.version):
            self.checkpoints.save(self.version, {})
        return "target" if reached else ""

    def _write_row(self, step: OptimizerStep, taken: StepBatch) -> None:
        metrics = Metrics.of([step.metrics])
        batch = taken.batch
        sizes = {"rollouts": 0, "tokens": 0, "tokens_with_prompts": 0, "left_out": taken.left_out}
        if batch is not None:
            sizes |= {"rollouts": batch.rollouts, "tokens": int(batch.loss_mask_N.sum())}
            sizes["tokens_with_prompts"] = batch.tokens
        for name, size in sizes.items():
            metrics.add(f"train/{name}", Sum(size))
        with self.spans("wait/ranks"):
            every = exchange_per_data_rank(self.backend, metrics.to_wire())
            readings = self.backend.exchange(self.records.utilization.reading())
        values = Metrics.of(map(Metrics.from_wire, every)).values() | {
            "train/loss": step.losses[POLICY],
            "train/grad_norm": step.norms[POLICY],
            "train/lr": step.rates[POLICY],
        }
        spans = self.spans.take()
        row = step_row(
            self.version, values | self.records.utilization.values(values, spans, readings), spans, {}, {}
        )
        self.status.figures = row
        self.records.write(row)

    def _look_at_held_out(self) -> bool:
        """Collective: score the model, write the row. Returns whether the target accuracy is reached."""
        with self.spans("compute/evaluate"):
            found = self.heldout.scores() | (self.answers.scores() if self.answers else {})
        if found:
            self.records.write({"version": self.version, **found})
        self.scores = found
        until = self.until_accuracy
        with self.spans("wait/ranks"):
            accuracy = self.backend.exchange(found.get(ACCURACY))[0]
        return until is not None and accuracy is not None and accuracy >= until

    def _agreed_reason_to_leave(self) -> str:
        """Why all ranks leave the loop now; empty to go on. A checkpoint that all have written is completed."""
        with self.spans("wait/ranks"):
            every = self.backend.exchange([self.stop.is_set(), self.checkpoints.state])
        stops, states = zip(*every, strict=True)
        self.checkpoints.settle(states)
        return STOPPED if any(stops) else ""

    def _finish(self, reason: str) -> None:
        """A requested stop leaves out the last look at the held-out tasks and the export."""
        if reason != STOPPED and self.version % self.every:
            self._look_at_held_out()
        self.checkpoints.save(self.version, {})
        self.checkpoints.finish()
        if reason != STOPPED:
            with tracing.span("disk", "export", version=self.version):
                self.backend.export_hf(self.output)
        if self.backend.rank == 0:
            self.records.write_summary(reason, {})
        self.backend.exchange(None)
