"""The process of an offline job: one rank, by RANK and WORLD_SIZE, or the only one."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.errors import StoppedError
from asyncrl.launch.folder.run_folder import claimed_by_learner, run_folder
from asyncrl.launch.views.process_view import LearnerView, shown
from asyncrl.learner import checkpoint
from asyncrl.learner.algorithms.roles import POLICY
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.process import open_rank, stop_on_interrupt
from asyncrl.learner.reporting.report import RunRecords
from asyncrl.learner.training.accumulator import Accumulator, Trainable
from asyncrl.learner.training.experience import Experience
from asyncrl.learner.training.passes import LocalModel
from asyncrl.offline.batches import Batches
from asyncrl.offline.examples import demonstrations, one_by_one
from asyncrl.offline.heldout import Answers, HeldOutLoss
from asyncrl.offline.jobs import SFT, PlannedJob, planned
from asyncrl.offline.reference import FILE, ReferenceMargins
from asyncrl.offline.trainer import OfflineTrainer
from asyncrl.system.rank_process import end_rank, rank_and_world
from asyncrl.system.signals import stop_signals
from asyncrl.tasks.stream import TaskStream
from asyncrl.telemetry.spans import Spans
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import Version

log = logging.getLogger(__name__)

ANSWERING = ".answering.partial"
"""In the run folder: the weights with which rank 0 of several answers held-out tasks."""


def train_supervised(config: Config) -> dict[str, Any]:
    """`train` the job SFT."""
    return train(planned(SFT, config))


def train(plan: PlannedJob, file: str | Path = "") -> dict[str, Any]:
    """Run this rank of the job to its end: a run in `<run.dir>/<run.name>-<verb>`. Returns what was reached.

    file: where the configuration was read from. Ranks but the first leave the process here after a requested stop.
    Raises ConfigError for a run folder in use, StoppedError after a requested stop, KeyboardInterrupt instead after
    SIGINT, and as `OfflineTrainer.run`.
    """
    config, status = plan.config, ProcessStatus()
    rank, world = rank_and_world()
    with ExitStack() as stack:
        stack.enter_context(claimed_by_learner(config, file) if rank == 0 else nullcontext())
        view = LearnerView(config, run_folder(config), status)
        stack.enter_context(shown("learner", view, status, config))
        stop, interrupts = stack.enter_context(_stop_requests())
        started = time.monotonic()
        backend = open_rank(plan.trained)
        stack.callback(backend.close)
        status.loaded.set()
        trainer = _open_trainer(plan, backend, status, stop, stack)
        try:
            trainer.run()
        except StoppedError as stopped:
            if interrupts:
                raise KeyboardInterrupt from None
            if world > 1 and rank > 0:
                end_rank(stopped.exit_code)
            raise
    return {
        "steps": trainer.version,
        "seconds": time.monotonic() - started,
        "output": str(trainer.output),
        **{name.replace("eval/", ""): value for name, value in trainer.scores.items()},
    }


def _open_trainer(
    plan: PlannedJob, backend: Backend, status: ProcessStatus, stop: threading.Event, stack: ExitStack
) -> OfflineTrainer:
    """Collective. stack: closes what is opened here."""
    job, config, chosen = plan.job, plan.config, plan.job.chosen(plan.config)
    folder, spans = run_folder(config), Spans("learner")
    checkpoint.require_one_folder(folder, backend)
    experience, objective = Experience(backend, config, spans), job.objective(config)
    batches, held_out = _open_batches(plan, backend, experience, stack)
    saved = _restore(config, backend, folder, status)
    version = saved or 0
    learning = Trainable(POLICY, LocalModel(backend.policy), objective, config.learner.optimizer)
    records = RunRecords(folder, config)
    if backend.rank == 0:
        records.open(version)
    answers = Answers(config, backend, folder / ANSWERING) if job.answers(config) else None
    return OfflineTrainer(
        config=config,
        backend=backend,
        batches=batches,
        accumulator=Accumulator(backend, config, spans, learning=[learning]),
        heldout=HeldOutLoss(backend, experience, objective, held_out),
        answers=answers and stack.enter_context(answers),
        checkpoints=Checkpoints(config, backend, RowsByNumber(), spans, (), None, saved),
        records=records,
        status=status,
        spans=spans,
        stop=stop,
        every=chosen.every,
        output=Path(chosen.output) if chosen.output else folder / "final",
        until_accuracy=config.sft.until_accuracy if job is SFT else None,
        version=version,
    )


def _open_batches(
    plan: PlannedJob, backend: Backend, experience: Experience, stack: ExitStack
) -> tuple[Batches, list[MicroBatch | None]]:
    """Collective: (the batches of the steps, this rank's held-out examples)."""
    job, config, chosen = plan.job, plan.config, plan.job.chosen(plan.config)

    def batches_of(stream: TaskStream) -> Batches:
        make = one_by_one(partial(job.example, examples=plan.examples), stream.place_of)
        if job.plays(config):
            make = stack.enter_context(demonstrations(plan.examples.tokenizer, config))
        return Batches(
            stream=stream,
            make=make,
            finish=partial(job.finished, config=config),
            batch_size=chosen.batch_size,
            tasks=plan.tasks,
            max_tokens=chosen.max_tokens,
            data_rank=backend.data_rank,
            data_world=backend.data_world,
        )

    trained, held_out, held_out_tasks = batches_of(plan.stream), None, plan.held_out_tasks()
    if plan.held_out is not None and held_out_tasks:
        held_out = batches_of(plan.held_out)
    if job.has_reference(config):
        margins = ReferenceMargins(run_folder(config) / FILE)
        asked = [(trained, plan.tasks_to_come()), *([(held_out, held_out_tasks)] if held_out else [])]
        margins.open(backend, experience, asked, config.run.resume)
        trained, held_out = margins.added_to(trained), held_out and margins.added_to(held_out)
    chunks = held_out.chunks(held_out_tasks) if held_out else ()
    return trained, [held_out.of(chunk)[0] for chunk in chunks] if held_out else []


def _restore(config: Config, backend: Backend, folder: Path, status: ProcessStatus) -> Version | None:
    """Collective: load the newest checkpoint under `run.resume`. Returns its version; None without one."""
    found = checkpoint.to_resume(folder, set_aside=backend.rank == 0) if config.run.resume else None
    if found is None:
        return None
    with status.waiting(f"{found[0]} to be read"):
        backend.load(found[0] / checkpoint.STATE)
    log.info("restored step %d from %s", found[1].version, found[0])
    return found[1].version


class RowsByNumber:
    """The tasks of a step follow from its number: a checkpoint keeps nothing of them. See `Checkpoints`."""

    def snapshot(self) -> bytes:
        return b""

    def checkpointed(self, version: Version) -> None:
        return


@contextmanager
def _stop_requests() -> Iterator[tuple[threading.Event, list[int]]]:
    """(set by SIGINT and `stop_signals`, the SIGINTs so far)."""
    stop, interrupts = threading.Event(), list[int]()
    numbers = (*stop_signals(), signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in stop_signals():
            signal.signal(number, lambda *_: stop.set())
        stop_on_interrupt(stop, interrupts)
        yield stop, interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
