"""Before the learner's loop: restore, open the streams, publish the first version.

rank 0         newest checkpoint ─▸ open train and eval stream ──▸ epoch, lineage ─▸ metrics files
every rank     load ─────────────── exchange ──────────────────▸ pools ─▸ publisher ─▸ publish

train stream   bounded: no group older than `queue.max_staleness` versions when it is trained on
eval stream    unbounded: any age, any order; a group is a chunk of held-out tasks
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from asyncrl.config.config_consistency import AGREED, posted
from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.schema import Config
from asyncrl.config.sections.placement import REWARDS
from asyncrl.device.turns import DeviceTurn
from asyncrl.learner import checkpoint
from asyncrl.learner.algorithms.registry import needs
from asyncrl.learner.algorithms.roles import POLICY
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.checkpoint import Checkpoints, Meta
from asyncrl.learner.checks.group_check import GroupCheck
from asyncrl.learner.models.networks import blueprint, router_shape, vocabulary_size
from asyncrl.learner.publication import MakePublisher, Publication
from asyncrl.learner.remote.remote_model import RemoteModel
from asyncrl.learner.reporting.evaluation import Evaluations, EvaluationSchedule
from asyncrl.learner.reporting.report import RunRecords
from asyncrl.learner.reporting.saved_groups import KeptGroups
from asyncrl.learner.reporting.version_decisions import VersionDecisions
from asyncrl.learner.train_stream import TrainStream
from asyncrl.learner.trainer import FailurePolicy, Trainer
from asyncrl.learner.training import requirements
from asyncrl.learner.training.version_step import VersionStep, version_step
from asyncrl.models.adapters import FROZEN, base_digest
from asyncrl.models.loading import load_model_config
from asyncrl.queue.client.client import BlockingClient
from asyncrl.queue.protocol.settings import Frontier, StreamSettings
from asyncrl.queue.wire import wire
from asyncrl.rpc.keys import ClientKeys
from asyncrl.system.packages import check_package
from asyncrl.telemetry.spans import Spans
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import EVAL, TRAIN, Version

log = logging.getLogger(__name__)

EVAL_DEPTH = 64
"""Chunks of held-out tasks in the queue at once."""


@dataclass(frozen=True, slots=True)
class OpenedStreams:
    """The values that the queue has assigned to this learner.

    train_epoch, eval_epoch  go with every request about that stream
    lineage                  of the versions that this learner publishes
    empty_eval               snapshot of the eval stream before any evaluation has begun
    """

    train_epoch: int
    eval_epoch: int
    lineage: int
    empty_eval: bytes


def open_backend(config: Config) -> Backend:
    """The backend that `learner.own_backend`, or else `learner.backend` names. Raises ConfigError if its package is
    missing."""
    models = requirements.colocated(config)
    if config.learner.own_backend is not None:
        make = load_function(config.learner.own_backend, "learner.own_backend")
        return cast(Backend, make(config, models))
    if config.learner.backend == "fsdp":
        return FsdpBackend(config, models)
    check_package("megatron", "megatron", "learner.backend", config.learner.backend, "megatron-core")
    from asyncrl.learner.backends.megatron.backend import MegatronBackend

    return MegatronBackend(config, models)


def open_trainer(
    config: Config,
    backend: Backend,
    client: BlockingClient,
    make_publisher: MakePublisher,
    *,
    keys: ClientKeys | None,
    stop: threading.Event,
    heldout: Mapping[str, int],
    status: ProcessStatus,
    turn: DeviceTurn,
) -> Trainer:
    """Collective: the trainer of this rank, which has its device, at the version that it begins with, published.

    keys: those of the run's pools · heldout: the number of tasks of each evaluation set, by its name
    """
    spans, run_folder = Spans("learner"), Path(config.run.dir) / config.run.name
    pools, records = requirements.models_trained_in_pools(config), RunRecords(run_folder, config)
    remote_models = {name: RemoteModel(name, config, backend, client, keys) for name in pools}
    training = version_step(backend, config, spans, remote_models)
    folder, meta, version = _restore(config, backend, training, run_folder, status)
    opened = _open_streams(config, backend, client, records, meta)
    learner_epoch, lineage = backend.exchange(opened and [opened.train_epoch, opened.lineage])[0]
    _open_remote_models(config, remote_models, learner_epoch, folder, version, status)
    abandoned = _note_abandoned(backend, records, training, meta) if config.run.resume else range(0)
    decided = VersionDecisions(backend, version, lineage)
    publication = Publication(config, backend, make_publisher(lineage), training.gate, lineage, spans)
    publication.begin(client, version)
    evaluations = _open_records(config, client, opened, records, version, heldout)
    stream = TrainStream(
        client,
        backend,
        config,
        spans,
        check=group_check(config, published=max(abandoned, default=0)),
        prepare=training.prepare,
        learner_epoch=learner_epoch,
        stop=stop,
        idle=functools.partial(_idle, remote_models, evaluations),
        turn=turn,
        status=status,
    )
    empty_eval, saved = (opened.empty_eval if opened else None), (version if meta else None)
    return Trainer(
        config=config,
        backend=backend,
        client=client,
        version=version,
        version_step=training,
        stream=stream,
        publication=publication,
        checkpoints=Checkpoints(config, backend, stream, spans, remote_models.values(), empty_eval, saved),
        evaluations=evaluations,
        records=records,
        kept_groups=KeptGroups(run_folder, config.telemetry.groups_every),
        decisions=decided,
        failures=FailurePolicy(config.learner, stream),
        remote_models=remote_models,
        status=status,
        spans=spans,
        stop=stop,
        turn=turn,
    )


def _restore(
    config: Config, backend: Backend, training: VersionStep, run_folder: Path, status: ProcessStatus
) -> tuple[Path | None, Meta | None, Version]:
    """Load the newest checkpoint under `run.resume`. Returns its folder, its metadata and its version. Raises
    ConfigError unless all ranks see one run folder."""
    checkpoint.require_one_folder(run_folder, backend)
    found = checkpoint.to_resume(run_folder, set_aside=backend.rank == 0) if config.run.resume else None
    if found is None:
        return None, None, 0
    folder, meta = found
    with status.waiting(f"{folder} to be read"):
        backend.load(folder / checkpoint.STATE)
    training.controls = training.controls.restored(meta.controls, config.algorithm)
    log.info("restored version %d from %s", meta.version, folder)
    return folder, meta, meta.version


def _open_streams(
    config: Config, backend: Backend, client: BlockingClient, records: RunRecords, meta: Meta | None
) -> OpenedStreams | None:
    """Rank 0: open both streams and post the configuration that the other processes must agree with. meta: of the
    checkpoint to go on from."""
    if backend.rank != 0:
        return None
    even_tokens = records.utilization.training_flops.even_tokens
    # A learner that goes on may find its streams in use, by one that died: it rewinds them to their beginning.
    beginning = wire.pack(Frontier().to_wire()) if config.run.resume else None
    # Rewinding one stream forks the other: the lineage of the stream that is opened last is that of both.
    evals = client.open(EVAL, eval_settings(config), meta.eval if meta else beginning)
    settings = train_settings(config, backend.data_world, even_tokens)
    train = client.open(TRAIN, settings, meta.train if meta else beginning)
    if config.model.lora.travels:
        client.post(FROZEN, base_digest(config.model.path))
    client.post(AGREED, posted(config))
    # Evaluations under way do not outlive the learner: a checkpoint rewinds to a stream without any.
    empty_eval = client.snapshot(EVAL, learner_epoch=evals.learner_epoch)
    return OpenedStreams(train.learner_epoch, evals.learner_epoch, train.lineage, empty_eval)


def group_check(config: Config, published: Version = 0) -> GroupCheck:
    """The check of claimed groups. Reads the config.json of the models that the learner holds; raises ConfigError as
    `load_model_config`. published: the newest version that an earlier learner of the run may have published."""
    added = {name for stage in requirements.stages(config) for name in stage.adds}
    held = (POLICY, *sorted(requirements.colocated(config)))
    sizes = [vocabulary_size(blueprint(name, config), config) for name in held]
    count = config.algorithm.teacher_loss.likeliest
    return GroupCheck(
        rollouts=config.batch.group_size,
        longest=config.generator.max_length,
        vocabulary=min(sizes),
        columns=frozenset(added - {REWARDS}),
        likeliest=(count, sizes[0]) if count and "teacher" in added else None,
        greedy="greedy" in needs(config.algorithm),
        truncated=config.algorithm.truncated == "weigh" or not config.generator.makes_real_tokens,
        segments=config.agent.most_segments,
        router=router_shape(config) if config.model.router_replay else None,
        model=load_model_config(config.model),
        skip=config.learner.on_bad_batch == "skip",
        published=published,
    )


def train_settings(config: Config, data_world: int, even_tokens: float | None = None) -> StreamSettings:
    """The bounded stream, whose groups `data_world` data ranks share. A claim waits for the columns of all pools."""
    stages = requirements.stages(config)
    return StreamSettings(
        groups_per_version=config.batch.groups,
        max_staleness=config.queue.max_staleness,
        window=config.window,
        depth=config.depth,
        max_bytes=config.queue.max_bytes,
        lease_s=config.lease_s,
        learners=data_world,
        columns=tuple(name for stage in stages for name in stage.adds),
        stages=stages,
        wait_share=config.queue.wait_share,
        even_tokens=even_tokens,
        hedge_s=config.queue.hedge_s,
    )


def eval_settings(config: Config) -> StreamSettings:
    """The unbounded stream."""
    stages = requirements.evaluation_stages(config)
    return StreamSettings(
        groups_per_version=1,
        max_staleness=None,
        window=None,
        depth=EVAL_DEPTH,
        max_bytes=config.queue.max_bytes,
        lease_s=config.lease_s,
        columns=tuple(name for stage in stages for name in stage.adds),
        stages=stages,
    )


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


def _note_abandoned(backend: Backend, records: RunRecords, training: VersionStep, meta: Meta | None) -> range:
    """Versions beyond the restored one that a former learner may have published, with weights of its own. The gate
    does not compare these."""
    version = meta.version if meta else 0
    # A version is published before its row is written.
    last = records.last_version(version) + 1 if backend.rank == 0 else 0
    abandoned = range(version + 1, backend.exchange(last)[0] + 1)
    if training.gate is not None and meta is not None:
        training.gate.abandoned = abandoned
    return abandoned


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
