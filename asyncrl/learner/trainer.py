"""The learner's loop.

        open the streams, restore, publish the first version
                              │
       ┌──────────────────────▼───────────────────────┐
       │  groups of step k         ◂── queue          │  waits for generators, groups_deadline_s at most
       │     forward, backward, as they arrive,       │  works while the next claim is on its way
       │     or once all are in   (version_step.py)   │
       │  optimizer steps          ── all ranks ──    │  waits for the slowest rank
       │  publish version k+1      ──▸ weight stream  │  waits for a copy of its shards, never for a generator
       │  trained(k)               ──▸ queue          │  admission moves on: generators may lease again
       │  evaluation, checkpoint, metrics row         │  polls evaluations, waits for the disk
       └──────────────────────┬───────────────────────┘
                              │ last version · target reached · no more tasks · asked to stop
        last evaluation, checkpoint, export, summary, finish

Rank 0 alone opens streams, reports `trained`, evaluates and writes rows; every decision it takes reaches the
other ranks through `backend.exchange`, so that all of them leave the loop at the same step.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.schema import Config
from asyncrl.errors import TrainingError
from asyncrl.learner import checkpoint, report, requirements
from asyncrl.learner.backend import Backend
from asyncrl.learner.evaluation import ACCURACY, EVAL, PARK_S, PREFIX, Evaluation, Evaluations
from asyncrl.learner.ports import LearnerClient, Published, Trained, WeightPublisher
from asyncrl.learner.probing import Probes
from asyncrl.learner.stream import (
    TRAIN,
    GroupStream,
    NoGroups,
    StepBegunAnew,
    StopWaiting,
    StreamExhausted,
)
from asyncrl.learner.version_step import VersionReport, version_step
from asyncrl.queue import wire
from asyncrl.queue.ledger import Frontier, StreamSettings
from asyncrl.telemetry.sinks import JsonlSink, read_rows
from asyncrl.telemetry.spans import Spans
from asyncrl.types import Version

log = logging.getLogger(__name__)

MakePublisher = Callable[[int], WeightPublisher]
"""lineage → the publisher of this rank."""

LAST_TRANSFERS_S = 5.0
"""How long transfers under way may take once the learner is done."""

BAD_STEPS_IN_A_ROW = 3
"""Under `learner.on_bad_step: skip`: this many are no accident any more."""

EVAL_DEPTH = 64
"""Chunks of held-out tasks in the queue at once."""


class Trainer:
    """One rank of the learner. heldout: number of tasks of each evaluation set, by its name."""

    def __init__(
        self,
        config: Config,
        backend: Backend,
        client: LearnerClient,
        make_publisher: MakePublisher,
        run_folder: Path,
        heldout: Mapping[str, int] | None = None,
    ) -> None:
        self._config, self._backend, self._client = config, backend, client
        self._make_publisher, self._folder, self._heldout = make_publisher, run_folder, heldout or {}
        self._leads = backend.rank == 0
        self._spans = Spans()
        self._version_step = version_step(backend, config, self._spans)
        self._pool = report.Pool()
        self._stop = threading.Event()
        self._reached = False
        self._bad_steps = 0
        self._evaluations: Evaluations | None = None
        self._probes: Probes | None = None
        self._evaluated: set[Version] = set()
        self._started = time.monotonic()
        self.version: Version = 0
        self._saved: Version | None = None

    def request_stop(self) -> None:
        """Finish the version under way if it has come to its optimizer steps, write a checkpoint, end. From any thread
        or signal."""
        self._stop.set()

    def run(self) -> None:
        """To the last version, the target accuracy, or the request to stop.

        Raises DeadlineError when no group comes (after a checkpoint), TrainingError for a step that is not finite under
        `learner.on_bad_step: stop`, and what the queue and the publisher raise.
        """
        self._restore_and_open()
        stream = self._group_stream()
        try:
            self._evaluate_if_due()
            why = ""
            while not why and self.version < self._config.run.versions:
                why = self._agree() or self._step(stream)
            self._end(why)
        finally:
            stream.close()
            self._publisher.close(LAST_TRANSFERS_S)
            if self._leads:
                self._rows.close()

    # ------------------------------------------------------------------ before the loop

    def _restore_and_open(self) -> None:
        found = checkpoint.newest(self._folder) if self._config.run.resume else None
        meta = checkpoint.read_meta(found) if found else None
        if found and meta:
            checkpoint.load(found, self._backend)
            self.version = meta.version
            controls = self._version_step.controls.restored(meta.controls, self._config.algorithm)
            self._version_step.controls = controls
            log.info("restored version %d from %s", meta.version, found)
        opened = self._open_streams(meta) if self._leads else None
        self._learner_epoch, lineage, self._eval_epoch = self._backend.exchange(opened)[0]
        self._publisher = self._make_publisher(lineage)
        self._client.post(
            f"weights/{self._backend.rank}",
            {"endpoint": self._publisher.endpoint, "world": self._backend.world, "lineage": lineage},
        )
        self._open_gate(lineage, resumed=meta is not None)
        self._publisher.publish(self.version)
        self._note_probes()
        if self._leads:
            self._open_rows()

    @property
    def _beginning(self) -> bytes | None:
        """Where a stream stands without a checkpoint. A learner that goes on may find its streams in use, by the one
        before it, and takes them back to where they began."""
        return wire.pack(Frontier().to_wire()) if self._config.run.resume else None

    def _open_streams(self, meta: checkpoint.Meta | None) -> tuple[int, int, int]:
        """(learner epoch and lineage of the train stream, learner epoch of the eval stream)."""
        settings = train_settings(self._config, self._backend.world)
        # Rewinding a stream forks the others: the lineage of the one that is opened last is that of both.
        evals = self._client.open(EVAL, eval_settings(self._config), meta.eval if meta else self._beginning)
        train = self._client.open(TRAIN, settings, meta.train if meta else self._beginning)
        # Evaluations under way do not outlive the learner: a rewind goes back to a stream without any.
        self._pristine_eval = self._client.snapshot(EVAL, learner_epoch=evals.learner_epoch)
        if self._heldout:
            self._evaluations = Evaluations(
                self._client, evals.learner_epoch, self._heldout, self._config.evaluation
            )
        return train.learner_epoch, train.lineage, evals.learner_epoch

    def _open_gate(self, lineage: int, resumed: bool) -> None:
        """∀ What a former learner published beyond the version that this one resumes at is not this one's."""
        gate = self._version_step.gate
        if gate is not None and resumed:
            rows = read_rows(self._folder / report.ROWS) if self._leads else ()
            # A version is published before its row is written.
            last = max((row["version"] for row in rows), default=self.version) + 1
            gate.abandoned = range(self.version + 1, self._backend.exchange(last)[0] + 1)
        if gate is not None and self._config.probing:
            self._probes = Probes(self._config, self._backend, gate, lineage)

    def _note_probes(self) -> None:
        """∀ The version was just published, and the policy is still it."""
        if self._probes is not None:
            with self._spans("compute/predict"):
                self._probes.note(self.version)

    def _open_rows(self) -> None:
        path = self._folder / report.ROWS
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rows = JsonlSink(path, resume_at=self.version if self._config.run.resume else None)
        self._evaluated = {
            row["version"] for row in read_rows(path) if any(key.startswith(PREFIX) for key in row)
        }

    def _group_stream(self) -> GroupStream:
        return GroupStream(
            self._client,
            self._backend,
            self._spans,
            learner_epoch=self._learner_epoch,
            max_tokens=self._config.learner.micro_batch_tokens,
            whole=self._config.queue.max_staleness == 0,
            deadline_s=self._config.learner.groups_deadline_s,
            stopping=self._stop.is_set,
            idle=self._poll_evaluations,
        )

    # ------------------------------------------------------------------ one version

    def _agree(self) -> str:
        """Why all ranks should leave the loop now; empty to go on."""
        mine = "stopped" if self._stop.is_set() else "target" if self._reached else ""
        with self._spans("wait/ranks"):
            return next((why for why in self._backend.exchange(mine) if why), "")

    def _step(self, stream: GroupStream) -> str:
        """Train on version k's groups and publish k+1. Returns why to leave the loop, or nothing."""
        try:
            for groups in stream.step(self.version):
                self._version_step.add(groups, self.version)
        except StopWaiting:
            self._version_step.abandon()
            return "stopped"
        except StepBegunAnew:
            self._version_step.abandon()
            log.warning("the queue took the step of version %d apart: it begins anew", self.version)
            return ""
        except StreamExhausted:
            log.info("the task source has ended")
            return "exhausted"
        except NoGroups:
            self._version_step.abandon()
            self._checkpoint()
            raise
        if requirements.whole_batch(self._config) and (why := self._agree()):
            self._version_step.abandon()  # nearly all of its work is still to come
            return why
        done = self._version_step.step(self.version)
        if done.refused:
            return self._refuse(done)
        self._bad_steps = 0
        with self._spans("wait/publish"):
            published = self._publisher.publish(self.version + 1)
        trained = self._report_trained()
        self.version += 1
        self._note_probes()
        if self._leads and trained:
            self._write_row(done, trained, published)
        self._evaluate_if_due()
        if self.version % self._config.checkpoint.every == 0:
            self._checkpoint()
        return ""

    def _refuse(self, done: VersionReport) -> str:
        """A step that is not finite moved no model; earlier steps of this version stand. The version's groups are
        dropped and others take their place."""
        self._bad_steps += 1
        what = f"the step from version {self.version} has {done.refused}"
        if self._config.learner.on_bad_step == "stop" or self._bad_steps >= BAD_STEPS_IN_A_ROW:
            raise TrainingError(
                f"{what}, the {self._bad_steps}. such step in a row; "
                "that step moved nothing, earlier steps of this version stand"
            )
        log.warning("%s: its groups are dropped", what)
        if self._leads:
            self._client.reject(
                TRAIN, learner_epoch=self._learner_epoch, step=self.version, reason="not_finite"
            )
        self._backend.exchange(None)
        return ""

    def _report_trained(self) -> Trained | None:
        """Other ranks must not claim the next step before the queue knows that this one is over."""
        trained = None
        if self._leads:
            with self._spans("wait/queue"):
                waited = self._spans.share("wait/groups")
                trained = self._client.trained(
                    TRAIN, learner_epoch=self._learner_epoch, step=self.version, waited=waited
                )
        with self._spans("wait/ranks"):
            self._backend.exchange(None)
        return trained

    def _write_row(self, done: VersionReport, trained: Trained, published: Published) -> None:
        spans, pool = self._spans.take(), self._pool.update(trained.stats)
        probed = self._probes.judge(trained.stats) if self._probes is not None else {}
        sent = report.publish_values(published, self._publisher.stats())
        values = {**done.values, **probed, **sent}
        self._rows.write(report.step_row(self.version, values, spans, trained.depth, pool))

    # ------------------------------------------------------------------ beside the loop

    def _evaluate_if_due(self, last: bool = False) -> None:
        if self._evaluations is None:
            return
        due = last or self.version % self._config.evaluation.every == 0
        if due and self.version not in self._evaluated:
            self._evaluated.add(self.version)
            self._evaluations.start(self.version)
        self._poll_evaluations()

    def _poll_evaluations(self) -> None:
        if self._evaluations is not None:
            self._note(self._evaluations.poll())

    def _note(self, evaluations: list[Evaluation]) -> None:
        target = self._config.run.target_accuracy
        for whole in evaluations:
            self._rows.write({"version": whole.version, **whole.scores})
            self._reached = self._reached or (target is not None and whole.scores[ACCURACY] >= target)

    def _checkpoint(self) -> None:
        if self._saved == self.version:
            return
        with self._spans("wait/checkpoint"):
            train = b""
            if self._leads:
                train = self._client.snapshot(TRAIN, learner_epoch=self._learner_epoch)
            evals = self._pristine_eval if self._leads else None
            adapted = self._version_step.controls.adapted(self._config.algorithm)
            meta = checkpoint.Meta(self.version, train, evals, adapted)
            checkpoint.save(self._folder, self._backend, meta, self._config.checkpoint.keep)
            if self._leads:
                self._client.checkpointed(TRAIN, learner_epoch=self._learner_epoch, version=self.version)
        self._saved = self.version

    def _end(self, why: str) -> None:
        """why: 'stopped' leaves out what takes long; 'target' or nothing (the last version) does all of
        it."""
        if why != "stopped":
            self._evaluate_if_due(last=True)
        self._checkpoint()
        if why != "stopped":
            self._backend.export_hf(self._folder / "final")
            self._finish_evaluations()
        if self._leads:
            self._write_summary()
            self._client.finish(why or "done")
        self._backend.exchange(None)

    def _finish_evaluations(self) -> None:
        """Wait for what is pending, all ranks together: one that waited alone would outlast the others' collectives."""
        deadline_s = self._config.learner.groups_deadline_s
        until = time.monotonic() + deadline_s
        while self._backend.exchange(self._evaluating() and time.monotonic() < until)[0]:
            if self._evaluations is not None:
                self._note(self._evaluations.poll(PARK_S))
        if self._evaluating():
            log.warning("no result within %.0f s: an evaluation is missing", deadline_s)

    def _evaluating(self) -> bool:
        return self._evaluations is not None and bool(self._evaluations.pending) and not self._stop.is_set()

    def _write_summary(self) -> None:
        rows = list(read_rows(self._folder / report.ROWS))
        wall_s = time.monotonic() - self._started
        bound = self._config.queue.max_staleness
        report.write_summary(self._folder, report.summarise(rows, max_staleness=bound, wall_s=wall_s))


def train_settings(config: Config, learners: int) -> StreamSettings:
    """The bounded stream."""
    return StreamSettings(
        groups_per_version=config.batch.groups,
        max_staleness=config.queue.max_staleness,
        window=config.window,
        depth=config.depth,
        max_bytes=config.queue.max_bytes,
        lease_s=config.queue.lease_s,
        learners=learners,
        wait_share=config.queue.wait_share,
    )


def eval_settings(config: Config) -> StreamSettings:
    """The unbounded one: any age, any order, a chunk of held-out tasks a group."""
    return StreamSettings(
        groups_per_version=1,
        max_staleness=None,
        window=None,
        depth=EVAL_DEPTH,
        max_bytes=config.queue.max_bytes,
        lease_s=config.queue.lease_s,
    )


def run_learner(config: Config, heldout: Mapping[str, int] | None = None) -> None:
    """The process: one rank as torchrun's RANK and WORLD_SIZE say, or the only one. heldout: as in `Trainer`.

    SIGTERM and SIGINT ask for a clean end. A rank of several leaves the process here when all went well.
    """
    from asyncrl.learner.fsdp import FsdpBackend, end_rank
    from asyncrl.queue.client import BlockingClient
    from asyncrl.queue.keys import client_keys
    from asyncrl.sync.ends import open_publisher

    if config.learner.threads:
        torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    backend = FsdpBackend(config, requirements.models(config))
    who = f"learner rank {backend.rank}"
    client: Any = BlockingClient(
        config.queue.address,
        run=config.run.name,
        who=who,
        deadline_s=config.queue.deadline_s,
        keys=client_keys(config.queue.keys),
    )

    def make_publisher(lineage: int) -> WeightPublisher:
        layout, tensors = backend.layout(), backend.local_tensors()
        rank, world = backend.rank, backend.world
        keys = client_keys(config.queue.keys)
        return open_publisher(config.run.name, rank, world, layout, tensors, config.sync, lineage, keys)

    trainer = Trainer(
        config, backend, client, make_publisher, Path(config.run.dir) / config.run.name, heldout
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: trainer.request_stop())
    client.connect()
    try:
        trainer.run()
    finally:
        client.close()
        backend.close()
    if backend.world > 1:
        end_rank()
