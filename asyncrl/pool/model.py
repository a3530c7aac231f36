"""A model of a pool, sharded over the ranks of one process: what it says of the tokens of a group.

Axes:  N tokens of the group
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgpack
import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.config.sections.parallel import ParallelConfig
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
from asyncrl.queue.wire.payload import decode_group, encode_group
from asyncrl.types import Group

SAY = "say"

Job = Callable[[Any], Any]
"""∀ What all ranks do with a msgpack-able value that rank 0 was given; what it returns counts on rank 0."""


class PoolModel:
    """One of `roles.MODELS`.

    The model is sharded over the ranks of this process, and so are the rollouts of each group; a group gets passes of
    its own, of at most learner.micro_batch_tokens. Raises ConfigError for a model that cannot be loaded or does not
    speak the policy's tokens.
    """

    def __init__(self, name: str, config: Config) -> None:
        check_vocabularies([name], config)
        self.name, self.config = name, config
        self.ranks = ModelRanks()
        self._jobs: dict[str, Job] = {SAY: self._say}
        self._model = self._made()

    def _made(self) -> ShardedModel:
        """As it is at the beginning of a run."""
        plan, learner = blueprint(self.name, self.config), self.config.learner
        sharded, device = ParallelConfig(), self.ranks.device  # over all ranks, along no other axis
        mesh = Mesh(axis_sizes(sharded, self.ranks.world), self.ranks.rank, device.type)
        origin = origin_of(self.name, self.config)
        network = load_network(self.name, self.config, empty=origin is not None)
        if plan.optimizer is not None:
            prepare_layers(network, learner)
        offload = Offload.of(learner, device)
        return ShardedModel(network, plan.optimizer, device, mesh, sharded, offload=offload, origin=origin)

    async def said(self, group: Group) -> Tensor:
        """`says`, off the event loop."""
        said_N: Tensor = await in_thread(self.says, group)
        return said_N

    def says(self, group: Group) -> Tensor:
        """[N] float32 on the CPU, 0 where the loss mask is 0. On rank 0, while the others `follow`."""
        said_N: Tensor = self.together(SAY, _packed(group))
        return said_N

    def together(self, job: str, value: Any) -> Any:
        """Rank 0, in any thread: one job after the other."""
        with self.ranks.turn:
            if self.ranks.world > 1:
                self.ranks.tell(msgpack.packb([job, value]))
            return self._jobs[job](value)

    def follow(self) -> None:
        """Ranks above 0: until rank 0 has closed."""
        while (message := self.ranks.hear()) is not None:
            job, value = msgpack.unpackb(message)
            self._jobs[job](value)

    def _say(self, frames: list[bytes]) -> Tensor:
        """∀ Each rank takes every world-th pass; they run equally many."""
        batch, world = MicroBatch.of([decode_group(frames)]), self.ranks.world
        said_N = torch.zeros(batch.tokens)
        most = min(self.config.learner.micro_batch_tokens, -(-batch.tokens // world))
        passes = bins(batch, range(batch.rollouts), most)
        mine = passes[self.ranks.rank :: world]
        for turn in range(-(-len(passes) // world)):
            if turn < len(mine):
                said_N[batch.tokens_of(mine[turn])] = self._model.predict(batch.select(mine[turn]))
            else:
                self._model.predict(MicroBatch.empty())
        return self.ranks.total(said_N)


def _packed(group: Group) -> list[bytes]:
    """What a model looks at of it: not the columns that others have added."""
    frames = encode_group(dataclasses.replace(group, columns={})).frames
    return [bytes(frame) for frame in frames]
