"""A model of a pool, sharded over the ranks of one process: its log-probs or values of the tokens of a group.

Axes:  N tokens of the group
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.config.sections.learner import ParallelConfig
from asyncrl.generator.threads import in_thread
from asyncrl.learner.backends.checkpoint_source import origin_of
from asyncrl.learner.backends.fsdp.layers import prepare_layers
from asyncrl.learner.backends.fsdp.offload import Offload
from asyncrl.learner.backends.fsdp.sharded import ShardedModel
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.packing import bins
from asyncrl.learner.models.networks import blueprint, check_vocabularies, load_network
from asyncrl.learner.parallel.mesh import Mesh, axis_sizes
from asyncrl.pool.ranks import ModelRanks
from asyncrl.pool.worker import AddColumns, LeftOut
from asyncrl.queue.wire.payload import decode_group, encode_group
from asyncrl.types import TRAIN, Array, Group

PREDICT = "predict"
"""The job of `PoolModel.predict`."""

NOT_FINITE = "not_finite"

Job = Callable[[Any], Any]
"""Collective: the work of all ranks on a msgpack-able value of rank 0; the result of rank 0 counts."""


class PoolModel:
    """One of `roles.MODELS`.

    The model is sharded over the ranks of this process, and so are the rollouts of each group; a group gets passes of
    its own, of at most learner.micro_batch_tokens. Raises ConfigError for a model that cannot be loaded or has another
    vocabulary than the policy.
    """

    def __init__(self, name: str, config: Config) -> None:
        check_vocabularies([name], config)
        self.name, self.config = name, config
        self.ranks = ModelRanks()
        self._jobs: dict[str, Job] = {PREDICT: self._predict}
        self._model = self._load_initial()

    def _load_initial(self) -> ShardedModel:
        """The model at the beginning of a run."""
        plan, learner = blueprint(self.name, self.config), self.config.learner
        sharded, device = ParallelConfig(), self.ranks.device  # over all ranks, along no other axis
        mesh = Mesh(axis_sizes(sharded, self.ranks.world), self.ranks.rank, device.type)
        origin = origin_of(self.name, self.config)
        network = load_network(self.name, self.config, empty=origin is not None)
        if plan.optimizer is not None:
            prepare_layers(network, learner)
        offload = Offload.of(learner, device)
        return ShardedModel(network, plan.optimizer, device, mesh, sharded, offload=offload, origin=origin)

    async def predict_in_thread(self, group: Group) -> Tensor:
        """`predict`, off the event loop."""
        values_N: Tensor = await in_thread(self.predict, group)
        return values_N

    def predict(self, group: Group) -> Tensor:
        """[N] float32 on the CPU, 0 where the loss mask is 0. On rank 0, while the others `follow`."""
        values_N: Tensor = self.together(PREDICT, _packed(group))
        return values_N

    def together(self, job: str, value: Any) -> Any:
        """Run a job on all ranks. On rank 0, in any thread, one job after the other."""
        with self.ranks.turn:
            if self.ranks.world > 1:
                self.ranks.broadcast(msgpack.packb([job, value]))
            return self._jobs[job](value)

    def follow(self) -> None:
        """Ranks above 0: do the jobs of rank 0 until it has closed."""
        while (message := self.ranks.receive()) is not None:
            job, value = msgpack.unpackb(message)
            self._jobs[job](value)

    def _predict(self, frames: list[bytes]) -> Tensor:
        """Collective: each rank takes every world-th pass; they run equally many."""
        batch, world = MicroBatch.of([decode_group(frames)]), self.ranks.world
        values_N = torch.zeros(batch.tokens)
        most = min(self.config.learner.micro_batch_tokens, -(-batch.tokens // world))
        passes = bins(batch, range(batch.rollouts), most)
        mine = passes[self.ranks.rank :: world]
        for turn in range(-(-len(passes) // world)):
            if turn < len(mine):
                values_N[batch.tokens_of(mine[turn])] = self._model.predict(batch.select(mine[turn]))
            else:
                self._model.predict(MicroBatch.empty())
        return self.ranks.total(values_N)


class InferenceModel(PoolModel):
    """`PoolWork` of a model that is not trained: its column has the name of the model."""

    concurrency = 1

    @property
    def streams(self) -> Mapping[str, AddColumns]:
        return {TRAIN: self.columns}

    def stats(self) -> Mapping[str, float]:
        return {}

    async def ready(self) -> None:
        """Returns at once: the model is ready when it is loaded."""

    def check(self) -> None:
        """Nothing."""

    async def columns(self, group: Group) -> Mapping[str, Array]:
        """Raises LeftOut."""
        values_N = await self.predict_in_thread(group)
        if not torch.isfinite(values_N).all():
            raise LeftOut(NOT_FINITE, f"the {self.name} gives a log-prob that is not finite")
        return {self.name: values_N.numpy()}


def _packed(group: Group) -> list[bytes]:
    """The group without the columns of other stages, as frames."""
    frames = encode_group(dataclasses.replace(group, columns={})).frames
    return [bytes(frame) for frame in frames]
