"""The learner's two streams at the queue: their settings, and how they are opened.

train   bounded: no group older than `queue.max_staleness` versions when it is trained on
eval    unbounded: any age, any order; a group is a chunk of held-out tasks
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.config_consistency import AGREED, posted
from asyncrl.config.schema import Config
from asyncrl.learner.checkpoint import Meta
from asyncrl.learner.training import requirements
from asyncrl.queue.client.client import BlockingClient
from asyncrl.queue.protocol.settings import Frontier, StreamSettings
from asyncrl.queue.wire import wire
from asyncrl.types import EVAL, TRAIN

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


def open_streams(
    client: BlockingClient, config: Config, meta: Meta | None, data_world: int, even_tokens: float
) -> OpenedStreams:
    """Open both streams and post the configuration that the other processes must agree with. On rank 0 alone.

    Args:
        meta: Of the checkpoint to go on from.
        data_world, even_tokens: See `train_settings`.
    """
    # A learner that goes on may find its streams in use, by one that died: it rewinds them to their beginning.
    beginning = wire.pack(Frontier().to_wire()) if config.run.resume else None
    # Rewinding one stream forks the other: the lineage of the stream that is opened last is that of both.
    evals = client.open(EVAL, eval_settings(config), meta.eval if meta else beginning)
    settings = train_settings(config, data_world, even_tokens)
    train = client.open(TRAIN, settings, meta.train if meta else beginning)
    client.post(AGREED, posted(config))
    # Evaluations under way do not outlive the learner: a checkpoint rewinds to a stream without any.
    empty_eval = client.snapshot(EVAL, learner_epoch=evals.learner_epoch)
    return OpenedStreams(train.learner_epoch, evals.learner_epoch, train.lineage, empty_eval)


def train_settings(config: Config, data_world: int, even_tokens: float | None = None) -> StreamSettings:
    """The bounded stream, whose groups `data_world` learner ranks share. A claim waits for the columns of all pools.

    Args:
        data_world: Number of learner ranks with groups of their own.
        even_tokens: See `StreamSettings`.
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
    """The unbounded stream."""
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
