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

import dataclasses
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from asyncrl.config.config_consistency import AGREED, posted
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError, StoppedError, TrainingError
from asyncrl.learner import checkpoint
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.checks.finite_check import NotFinite
from asyncrl.learner.checks.logprob_check import LogprobProbes
from asyncrl.learner.ports import LearnerClient, Published, Trained, WeightPublisher
from asyncrl.learner.remote.remote_model import RemoteModel
from asyncrl.learner.reporting import report
from asyncrl.learner.reporting.evaluation import ACCURACY, EVAL, PARK_S, PREFIX, Evaluation, Evaluations
from asyncrl.learner.reporting.rollout_log import GROUPS, RolloutLog
from asyncrl.learner.reporting.utilization import Utilization
from asyncrl.learner.stream import (
    TRAIN,
    GroupStream,
    NoGroups,
    StepBegunAnew,
    StopWaiting,
    StreamExhausted,
    check_size,
)
from asyncrl.learner.training import requirements
from asyncrl.learner.training.version_step import VersionReport, version_step
from asyncrl.queue.ledger.ledger import Frontier, StreamSettings
from asyncrl.queue.wire import wire
from asyncrl.stop_signals import stop_signals
from asyncrl.telemetry.sinks import JsonlSink, Sinks, read_rows
from asyncrl.telemetry.spans import Spans
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.telemetry.trackers import TRACKERS, Run
from asyncrl.types import Group, Version

log = logging.getLogger(__name__)

NOT_FINITE = "not_finite"
"""Why groups are dropped."""

MakePublisher = Callable[[int], WeightPublisher]
"""lineage → the publisher of this rank."""

STOPPED = StoppedError.ended
"""Why the loop was left, one of several reasons: somebody asked for it."""

LAST_TRANSFERS_S = 5.0
"""How long transfers under way may take once the learner is done."""

BAD_STEPS_IN_A_ROW = 3
"""Under `learner.on_bad_step: skip`: this many are no accident any more."""

BAD_BATCHES_IN_A_ROW = 3
"""Under `learner.on_bad_batch: skip`: a version begun anew this often has a model that is broken, not its groups."""

EVAL_DEPTH = 64
"""Chunks of held-out tasks in the queue at once."""


class Trainer:
    """One rank of the learner. heldout: number of tasks of each evaluation set, by its name · pooled: models that learn
    on pools · status: gets what this rank waits for"""

    def __init__(
        self,
        config: Config,
        backend: Backend,
        client: LearnerClient,
        make_publisher: MakePublisher,
        run_folder: Path,
        heldout: Mapping[str, int] | None = None,
        pooled: Mapping[str, RemoteModel] | None = None,
        status: ProcessStatus | None = None,
    ) -> None:
        self._config, self._backend, self._client = config, backend, client
        self._make_publisher, self._folder, self._heldout = make_publisher, run_folder, heldout or {}
        self._pooled, self._status = pooled or {}, status or ProcessStatus()
        self._leads = backend.rank == 0
        self._spans = Spans()
        self._version_step = version_step(backend, config, self._spans, self._pooled)
        self._pool, self._health = report.GeneratorTotals(), Utilization(config)
        self._stop = threading.Event()
        self._reached = False
        self._bad_steps = self._bad_batches = self._left_out = 0
        self._evaluations: Evaluations | None = None
        self._probes: LogprobProbes | None = None
        self._rollout_log: RolloutLog | None = None
        self._evaluated: set[Version] = set()
        self._started = time.monotonic()
        self.version: Version = 0
        self._saver = checkpoint.Saver(
            run_folder, backend, config.checkpoint, self._pooled.values(), fsync=config.queue.fsync
        )
        self._saved: Version | None = None  # the newest version that is saved, or being saved

    def request_stop(self) -> None:
        """Finish the version under way if it has come to its optimizer steps, write a checkpoint, end. From any thread
        or signal."""
        self._stop.set()

    def run(self) -> None:
        """To the last version, the target accuracy, or the request to stop.

        Raises StoppedError after such a request, and DeadlineError when no group comes, both after a checkpoint;
        TrainingError for what is not finite under `learner.on_bad_step` and `on_bad_batch: stop`, and what the queue
        and the publisher raise.
        """
        self._restore_and_open()
        stream = self._group_stream()
        try:
            self._evaluate_if_due()
            why = ""
            while not why and self.version < self._config.run.versions:
                why = self._agree() or self._step(stream)
            self._end(why)
        except Exception:
            self._saver.rescue()
            raise
        finally:
            stream.close()
            self._publisher.close(LAST_TRANSFERS_S)
            if self._leads:
                self._rows.close()
            if self._rollout_log is not None:
                self._rollout_log.close()
            for model in self._pooled.values():
                model.close()
        if why == STOPPED:
            raise StoppedError(f"stopped at version {self.version}, which is saved; run.resume=true goes on")

    # ------------------------------------------------------------------ before the loop

    def _restore_and_open(self) -> None:
        resume = self._config.run.resume
        found, meta = (resume and checkpoint.to_resume(self._folder, set_aside=self._leads)) or (None, None)
        if found and meta:
            with self._status.waiting(f"{found} to be read"):
                checkpoint.load(found, self._backend)
            self.version = self._saved = meta.version
            controls = self._version_step.controls.restored(meta.controls, self._config.algorithm)
            self._version_step.controls = controls
            log.info("restored version %d from %s", meta.version, found)
        opened = self._open_streams(meta) if self._leads else None
        self._learner_epoch, lineage, self._eval_epoch = self._backend.exchange(opened)[0]
        for model in self._pooled.values():
            deadline_s = self._config.placement.places[model.name].deadline_s
            with self._status.waiting(f"the pool of the {model.name}", deadline_s):
                model.open(self._learner_epoch, found.name if found else None, self.version)
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
        even_tokens = self._health.work.even_tokens
        settings = train_settings(self._config, self._backend.data_world, even_tokens)
        # Rewinding a stream forks the others: the lineage of the one that is opened last is that of both.
        evals = self._client.open(EVAL, eval_settings(self._config), meta.eval if meta else self._beginning)
        train = self._client.open(TRAIN, settings, meta.train if meta else self._beginning)
        self._client.post(AGREED, posted(self._config))
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
            self._probes = LogprobProbes(self._config, self._backend, gate, lineage)

    def _note_probes(self) -> None:
        """∀ The version was just published, and the policy is still it."""
        if self._probes is not None:
            with self._spans("compute/predict"):
                self._probes.note(self.version)

    def _open_rows(self) -> None:
        path = self._folder / report.ROWS
        path.parent.mkdir(parents=True, exist_ok=True)
        (self._folder / report.SUMMARY).unlink(missing_ok=True)  # the run is going on again
        resume_at = self.version if self._config.run.resume else None
        telemetry = self._config.telemetry
        run = Run(self._config.run.name, self._folder, resume_at, dataclasses.asdict(self._config))
        self._rows = Sinks([JsonlSink(path, resume_at), *(TRACKERS[name](run) for name in telemetry.sinks)])
        if telemetry.rollouts_every:
            self._rollout_log = RolloutLog(self._folder, self._config, resume_at)
        self._evaluated = {
            row["version"] for row in read_rows(path) if any(key.startswith(PREFIX) for key in row)
        }

    def _group_stream(self) -> GroupStream:
        return GroupStream(
            self._client,
            self._backend,
            self._spans,
            learner_epoch=self._learner_epoch,
            max_tokens=requirements.claim_tokens(self._config),
            whole=self._config.queue.max_staleness == 0,
            deadline_s=self._config.learner.groups_deadline_s,
            stopping=self._stop.is_set,
            idle=self._while_waiting,
            status=self._status,
        )

    # ------------------------------------------------------------------ one version

    def _agree(self) -> str:
        """Why all ranks should leave the loop now; empty to go on. A checkpoint that all have written becomes whole."""
        mine = STOPPED if self._stop.is_set() else "target" if self._reached else ""
        with self._spans("wait/ranks"):
            whys, states = zip(*self._backend.exchange([mine, self._saver.state]), strict=True)
        self._note_saved(self._saver.settle(states))
        return next((why for why in whys if why), "")

    def _step(self, stream: GroupStream) -> str:
        """Train on version k's groups and publish k+1. Returns why to leave the loop, or nothing."""
        shown: list[Group] = []
        try:
            for groups in stream.step(self.version):
                for group in groups:
                    check_size(group, self._config.batch.group_size)
                self._version_step.add(groups, self.version)
                shown += groups[: GROUPS - len(shown)]
            if requirements.whole_batch(self._config) and (why := self._agree()):
                self._version_step.abandon()  # nearly all of its work is still to come
                return why
            done = self._version_step.step(self.version)
        except NotFinite as bad:
            return self._leave_out(bad, stream.attempt)
        except StopWaiting:
            self._version_step.abandon()
            return STOPPED
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
            self._finish_checkpoint()
            raise
        if done.refused:
            return self._refuse(done)
        self._bad_steps = self._bad_batches = 0
        with self._spans("wait/publish"):
            published = self._publisher.publish(self.version + 1)
        trained, memory = self._report_trained()
        self.version += 1
        self._note_probes()
        if self._leads and trained:
            self._write_row(done, trained, published, memory)
        if self._rollout_log is not None:
            self._rollout_log.write(self.version, shown)
        self._evaluate_if_due()
        if self.version % self._config.checkpoint.every == 0:
            self._checkpoint()
        return ""

    def _leave_out(self, bad: NotFinite, attempt: int) -> str:
        """The version is begun anew without its bad groups, which end as DROPPED(not_finite); others take their place.
        Nothing has moved."""
        self._version_step.abandon()
        self._bad_batches += 1
        if self._config.learner.on_bad_batch == "stop" or self._bad_batches >= BAD_BATCHES_IN_A_ROW:
            raise TrainingError(
                f"for version {self.version} {bad}; the {self._bad_batches}. such finding for it. Nothing has moved: "
                "look at these tasks and their rewards, or set learner.on_bad_batch=skip to train without them"
            )
        log.warning("for version %d %s: it is begun anew without them", self.version, bad)
        self._left_out += len(bad.ordinals)
        if self._leads:
            self._client.abandon(
                TRAIN,
                learner_epoch=self._learner_epoch,
                step=self.version,
                attempt=attempt,
                dropped=bad.ordinals,
                reason=NOT_FINITE,
            )
        self._backend.exchange(None)
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
                TRAIN, learner_epoch=self._learner_epoch, step=self.version, reason=NOT_FINITE
            )
        self._backend.exchange(None)
        return ""

    def _report_trained(self) -> tuple[Trained | None, list[int]]:
        """Other ranks must not claim the next step before the queue knows that this one is over. Also returns the
        memory that each rank has needed."""
        trained = None
        if self._leads:
            with self._spans("wait/queue"):
                waited = self._spans.share("wait/groups")
                trained = self._client.trained(
                    TRAIN, learner_epoch=self._learner_epoch, step=self.version, waited=waited
                )
        with self._spans("wait/ranks"):
            memory = self._backend.exchange(self._health.memory())
        return trained, memory

    def _write_row(
        self, done: VersionReport, trained: Trained, published: Published, memory: list[int]
    ) -> None:
        spans, pool = self._spans.take(), self._pool.update(trained.stats)
        probed = self._probes.judge(trained.stats) if self._probes is not None else {}
        sent = report.publish_values(published, self._publisher.stats())
        health = self._health.values(done.values, spans, memory)
        health["groups/not_finite"], self._left_out = self._left_out, 0
        values = {**done.values, **probed, **sent, **health}
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

    def _while_waiting(self) -> None:
        """For groups. None comes of a pool that is gone."""
        for model in self._pooled.values():
            model.check()
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
        """Begin to save this version, unless it is saved."""
        if self._saved == self.version:
            return
        self._finish_checkpoint()
        with self._spans("wait/checkpoint"):
            train = b""
            if self._leads:
                train = self._client.snapshot(TRAIN, learner_epoch=self._learner_epoch)
            evals = self._pristine_eval if self._leads else None
            adapted = self._version_step.controls.adapted(self._config.algorithm)
            meta = checkpoint.Meta(self.version, train, evals, adapted)
            self._saver.begin(meta)
        self._saved = self.version
        if not self._config.checkpoint.asynchronous:
            self._finish_checkpoint()

    def _finish_checkpoint(self) -> None:
        """Wait until the one under way is whole."""
        with self._spans("wait/checkpoint"):
            self._note_saved(self._saver.finish())

    def _note_saved(self, version: Version | None) -> None:
        """The queue may now forget what was trained before."""
        if version is not None and self._leads:
            self._client.checkpointed(TRAIN, learner_epoch=self._learner_epoch, version=version)

    def _end(self, why: str) -> None:
        """why: 'stopped' leaves out what takes long; 'target' or nothing (the last version) does all of
        it."""
        if why != STOPPED:
            self._evaluate_if_due(last=True)
        self._checkpoint()
        self._finish_checkpoint()
        if why != STOPPED:
            self._backend.export_hf(self._folder / "final")
            self._finish_evaluations()
        elif self._evaluations is not None:
            self._note(self._evaluations.rest())
        if self._leads:
            self._write_summary(why or "done")
            self._client.finish(why or "done")
        self._backend.exchange(None)

    def _finish_evaluations(self) -> None:
        """Wait for what is pending, all ranks together: one that waited alone would outlast the others' collectives."""
        deadline_s = self._config.learner.groups_deadline_s
        until = time.monotonic() + deadline_s
        with self._status.waiting("the last evaluation from the generators", deadline_s):
            while self._backend.exchange(self._evaluating() and time.monotonic() < until)[0]:
                if self._evaluations is not None:
                    self._note(self._evaluations.poll(PARK_S))
        late = self._evaluating()
        if self._evaluations is not None:
            self._note(self._evaluations.rest())
        if late:
            log.warning("no result within %.0f s: an evaluation is missing", deadline_s)

    def _evaluating(self) -> bool:
        return self._evaluations is not None and bool(self._evaluations.pending) and not self._stop.is_set()

    def _write_summary(self, ended: str) -> None:
        rows = list(read_rows(self._folder / report.ROWS))
        wall_s = time.monotonic() - self._started
        bound = self._config.queue.max_staleness
        summary = report.summarise(
            rows,
            max_staleness=bound,
            wall_s=wall_s,
            ended=ended,
            dropped=self._dropped(),
            began=time.time() - wall_s,
        )
        report.write_summary(self._folder, summary)

    def _dropped(self) -> Mapping[str, int] | None:
        """Tasks dropped so far, by reason, of which no row tells if they came after the last one."""
        try:
            counts: Mapping[str, int] = self._client.status()["streams"][TRAIN]["dropped_by_reason"]
        except AsyncRLError as error:
            log.warning(
                "how many tasks were dropped is that of the last row: the queue does not say (%s)", error
            )
            return None
        return counts


def train_settings(config: Config, data_world: int, even_tokens: float | None = None) -> StreamSettings:
    """The bounded stream, whose groups so many learner ranks share out. A claim needs whatever the pools add.

    even_tokens: as in `StreamSettings`
    """
    stages = requirements.stages(config)
    return StreamSettings(
        groups_per_version=config.batch.groups,
        max_staleness=config.queue.max_staleness,
        window=config.window,
        depth=config.depth,
        max_bytes=config.queue.max_bytes,
        lease_s=config.queue.lease_s,
        learners=data_world,
        columns=tuple(name for stage in stages for name in stage.adds),
        stages=stages,
        wait_share=config.queue.wait_share,
        even_tokens=even_tokens,
    )


def eval_settings(config: Config) -> StreamSettings:
    """The unbounded one: any age, any order, a chunk of held-out tasks a group."""
    stages = requirements.evaluation_stages(config)
    return StreamSettings(
        groups_per_version=1,
        max_staleness=None,
        window=None,
        depth=EVAL_DEPTH,
        max_bytes=config.queue.max_bytes,
        lease_s=config.queue.lease_s,
        columns=tuple(name for stage in stages for name in stage.adds),
        stages=stages,
    )


def run_learner(
    config: Config, heldout: Mapping[str, int] | None = None, status: ProcessStatus | None = None
) -> None:
    """The process: one rank as torchrun's RANK and WORLD_SIZE say, or the only one. heldout, status: as in `Trainer`.

    SIGINT and `stop_signals` ask for a clean end, of any rank: all of them leave then, with StoppedError, or with
    KeyboardInterrupt after SIGINT. A rank of several leaves the process here when all went well.
    """
    from asyncrl.learner.backends.factory import make_backend
    from asyncrl.learner.backends.fsdp.fsdp import end_rank
    from asyncrl.queue.client.client import BlockingClient
    from asyncrl.rpc.keys import client_keys
    from asyncrl.sync.channels.torch_transport import own_host
    from asyncrl.sync.factory import open_publisher

    status = status or ProcessStatus()
    if config.learner.threads:
        torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    backend = make_backend(config, requirements.colocated(config))
    status.loaded.set()
    who = f"learner rank {backend.rank}"
    keys = client_keys(config.queue.keys)
    client: Any = BlockingClient(
        config.queue.address,
        run=config.run.name,
        who=who,
        deadline_s=config.queue.deadline_s,
        keys=keys,
        status=status,
    )

    sync = config.sync
    if sync.host is None:
        sync = dataclasses.replace(sync, host=own_host(config.queue.address))

    def make_publisher(lineage: int) -> WeightPublisher:
        layout, tensors = backend.layout(), backend.local_tensors()
        rank, world = backend.rank, backend.world
        return open_publisher(config.run.name, rank, world, layout, tensors, sync, lineage, keys)

    pooled = {
        name: RemoteModel(name, config, backend.rank, backend.world, client, keys, backend.is_data_leader)
        for name in requirements.taught_on_pools(config)
    }
    folder = Path(config.run.dir) / config.run.name
    trainer = Trainer(config, backend, client, make_publisher, folder, heldout, pooled, status)
    for number in stop_signals():
        signal.signal(number, lambda *_: trainer.request_stop())
    code = 0
    try:
        client.connect()
        interrupts = _stop_on_interrupt(trainer)  # before this there is nothing to save
        trainer.run()
    except StoppedError as stopped:
        if backend.world == 1 and not interrupts:
            raise
        log.info("%s", stopped)
        if interrupts:
            raise KeyboardInterrupt from None
        code = stopped.exit_code
    finally:
        client.close()
        backend.close()
    if backend.world > 1:
        end_rank(code)


def _stop_on_interrupt(trainer: Trainer) -> list[int]:
    """Ctrl-C asks the trainer to stop, a second one ends the process at once. Returns the list that gets each."""
    interrupts: list[int] = []

    def on_interrupt(number: int, _frame: FrameType | None) -> None:
        interrupts.append(number)
        if len(interrupts) > 1:
            raise KeyboardInterrupt
        trainer.request_stop()
        text = "stopping: the learner writes a checkpoint and ends; Ctrl-C again ends it at once"
        threading.Thread(
            target=log.warning, args=(text,)
        ).start()  # the signal may have interrupted a log line

    signal.signal(signal.SIGINT, on_interrupt)
    return interrupts
