"""Before the learner's loop: restore, open the streams, publish the first version.

rank 0         newest checkpoint ─▸ open train and eval stream ──▸ epoch, lineage ─▸ metrics files
every rank     load ─────────────── exchange ──────────────────▸ pools ─▸ publisher ─▸ publish
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.learner import checkpoint
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.checkpoint import Meta
from asyncrl.learner.checkpoint_schedule import CheckpointSchedule
from asyncrl.learner.failure_policy import FailurePolicy
from asyncrl.learner.publication import MakePublisher, Publication
from asyncrl.learner.remote.remote_model import RemoteModel
from asyncrl.learner.reporting.evaluation import Evaluations, EvaluationSchedule
from asyncrl.learner.reporting.report import RunRecords
from asyncrl.learner.stream_settings import OpenedStreams, open_streams
from asyncrl.learner.train_stream import TrainStream
from asyncrl.learner.trainer import Trainer
from asyncrl.learner.training import requirements
from asyncrl.learner.training.version_step import VersionStep, version_step
from asyncrl.queue.client.client import BlockingClient
from asyncrl.telemetry.spans import Spans
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import Version

log = logging.getLogger(__name__)


def open_trainer(
    config: Config,
    backend: Backend,
    client: BlockingClient,
    make_publisher: MakePublisher,
    run_folder: Path,
    *,
    stop: threading.Event | None = None,
    heldout: Mapping[str, int] | None = None,
    remote_models: Mapping[str, RemoteModel] | None = None,
    status: ProcessStatus | None = None,
) -> Trainer:
    """Collective: the trainer of this rank, at the version that it begins with, which is published.

    Args:
        stop: See `Trainer`.
        heldout: Number of tasks of each evaluation set, by its name.
        remote_models: Models that learn in pools, by name.
        status: Shows what this rank waits for.
    """
    spans, stop, status = Spans(), stop or threading.Event(), status or ProcessStatus()
    remote_models = remote_models or {}
    training = version_step(backend, config, spans, remote_models)
    records = RunRecords(run_folder, config)
    folder, meta = _restore(config, backend, training, run_folder, status)
    version = meta.version if meta else 0
    opened = _open_streams(config, backend, client, records, meta)
    learner_epoch, lineage = backend.exchange(opened and [opened.train_epoch, opened.lineage])[0]
    _open_remote_models(config, remote_models, learner_epoch, folder, version, status)
    publication = Publication(config, backend, make_publisher(lineage), training.gate, lineage, spans)
    publication.post_endpoint(client)
    if training.gate is not None and meta is not None:
        training.gate.abandoned = _abandoned_versions(backend, records, version)
    publication.publish(version)
    publication.note_probes(version)
    evaluations = _open_records(config, client, opened, records, version, heldout or {})
    idle = functools.partial(_idle, remote_models, evaluations)
    stream = _train_stream(config, backend, client, learner_epoch, spans, stop, idle, status)
    models = remote_models.values()
    saver = checkpoint.Saver(run_folder, backend, config.checkpoint, models, fsync=config.queue.fsync)
    empty_eval = opened.empty_eval if opened else None
    saved = version if meta else None
    return Trainer(
        config=config,
        backend=backend,
        client=client,
        version=version,
        version_step=training,
        stream=stream,
        publication=publication,
        checkpoints=CheckpointSchedule(config.checkpoint, saver, stream, empty_eval, saved, spans),
        evaluations=evaluations,
        records=records,
        failures=FailurePolicy(config.learner, stream),
        remote_models=remote_models,
        status=status,
        spans=spans,
        stop=stop,
    )


def _restore(
    config: Config, backend: Backend, training: VersionStep, run_folder: Path, status: ProcessStatus
) -> tuple[Path | None, Meta | None]:
    """Load the newest checkpoint under `run.resume`. Returns its folder and its metadata."""
    found = checkpoint.to_resume(run_folder, set_aside=backend.rank == 0) if config.run.resume else None
    if found is None:
        return None, None
    folder, meta = found
    with status.waiting(f"{folder} to be read"):
        checkpoint.load(folder, backend)
    training.controls = training.controls.restored(meta.controls, config.algorithm)
    log.info("restored version %d from %s", meta.version, folder)
    return folder, meta


def _open_streams(
    config: Config, backend: Backend, client: BlockingClient, records: RunRecords, meta: Meta | None
) -> OpenedStreams | None:
    if backend.rank != 0:
        return None
    even_tokens = records.utilization.training_flops.even_tokens
    return open_streams(client, config, meta, backend.data_world, even_tokens)


def _open_remote_models(
    config: Config,
    models: Mapping[str, RemoteModel],
    learner_epoch: int,
    folder: Path | None,
    version: Version,
    status: ProcessStatus,
) -> None:
    for model in models.values():
        deadline_s = config.placement.places[model.name].deadline_s
        with status.waiting(f"the pool of the {model.name}", deadline_s):
            model.open(learner_epoch, folder.name if folder else None, version)


def _abandoned_versions(backend: Backend, records: RunRecords, version: Version) -> range:
    """Versions beyond the restored one that a former learner may have published, with weights of its own."""
    # A version is published before its row is written.
    last = records.last_version(version) + 1 if backend.rank == 0 else 0
    return range(version + 1, backend.exchange(last)[0] + 1)


def _open_records(
    config: Config,
    client: BlockingClient,
    opened: OpenedStreams | None,
    records: RunRecords,
    version: Version,
    heldout: Mapping[str, int],
) -> EvaluationSchedule:
    """Open the run's files on rank 0. Returns the schedule of the evaluations whose results they get."""
    if opened is not None:
        records.open(version)
    if opened is None or not heldout:
        return EvaluationSchedule(config, records, None, ())
    evaluations = Evaluations(client, opened.eval_epoch, heldout, config.evaluation)
    return EvaluationSchedule(config, records, evaluations, records.evaluated())


def _idle(models: Mapping[str, RemoteModel], evaluations: EvaluationSchedule) -> None:
    """While the learner waits for groups; none come from a pool that is gone."""
    for model in models.values():
        model.check()
    evaluations.poll()


def _train_stream(
    config: Config,
    backend: Backend,
    client: BlockingClient,
    learner_epoch: int,
    spans: Spans,
    stop: threading.Event,
    idle: Callable[[], None],
    status: ProcessStatus,
) -> TrainStream:
    return TrainStream(
        client,
        backend,
        spans,
        learner_epoch=learner_epoch,
        max_tokens=requirements.claim_tokens(config),
        whole=config.queue.max_staleness == 0,
        deadline_s=config.learner.groups_deadline_s,
        stopping=stop.is_set,
        idle=idle,
        status=status,
    )
