"""A model of a pool, sharded over ranks: its log-probs or values of the tokens of a group. Rank 0 takes groups from the
queue, the others follow it.

    rank 0   together(job) ──▸ its share of the job ─┐
    others   follow() ───────▸ their shares ─────────┴─▸ result      until rank 0 has closed

Between jobs rank 0 sends heartbeats, so that the others can wait while the queue is empty.

Axes:  N tokens of the group
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.config.sections.learner import ParallelConfig
from asyncrl.generator.threads import in_thread
from asyncrl.learner.backends.fsdp.sharded import ShardedModel
from asyncrl.learner.checks.finite_check import NOT_FINITE
from asyncrl.learner.checks.group_check import GroupCheck
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.packing import bins
from asyncrl.learner.models.networks import (
    blueprint,
    check_vocabularies,
    counts_prompts_once,
    vocabulary_size,
)
from asyncrl.learner.parallel.mesh import Mesh, axis_sizes
from asyncrl.learner.ranks.process_group import (
    COLLECTIVE_DEADLINE,
    broadcast,
    join_process_group,
    own_device,
)
from asyncrl.models.loading import load_model_config
from asyncrl.pool.worker import LeftOut, PoolWork
from asyncrl.queue.wire.payload import decode_group, encode_group
from asyncrl.system.rank_process import rank_and_world
from asyncrl.telemetry import tracing
from asyncrl.types import MEDIA, Array, Group

PREDICT, HEARTBEAT, CLOSE = "predict", "heartbeat", "close"
"""Jobs of every model of a pool; after the last one its ranks no longer follow."""

LATEST = (1 << 31) - 1
"""A pool does not know which versions exist; the learner checks that of a group."""

HEARTBEAT_S = COLLECTIVE_DEADLINE.total_seconds() / 10

CLOSE_S = 10.0
"""Longest wait, at the end, for a job that is still under way."""

Job = Callable[[Any], Any]
"""Collective: the work of all ranks on a msgpack-able value of rank 0; the result of rank 0 counts."""


class PoolModel:
    """One of `roles.ROLES`, by RANK and WORLD_SIZE; the only one if they are not set.

    The model is sharded over the ranks, and so are the rollouts of each group; a group gets passes of its own, of at
    most learner.micro_batch_tokens. Raises ConfigError for a model that cannot be loaded or has another vocabulary than
    the policy.
    """

    def __init__(self, name: str, config: Config) -> None:
        check_vocabularies([name], config)
        self.name, self.config = name, config
        self._vocabulary = vocabulary_size(blueprint(name, config), config)
        self._policy, self._shares = load_model_config(config.model), counts_prompts_once(name, config)
        self.rank, self.world = rank_and_world()
        self._device = own_device()
        self._turn = threading.Lock()  # a thread of rank 0 holds it until its job is done
        self._closed = threading.Event()
        self._jobs: dict[str, Job] = {PREDICT: self._predict, HEARTBEAT: lambda _: None}
        if self.world > 1:
            join_process_group(self._device, config)
            if self.rank == 0:
                threading.Thread(target=self._send_heartbeats, name="pool heartbeats", daemon=True).start()
        self._model = self._load_initial()

    def _load_initial(self) -> ShardedModel:
        """The model at the beginning of a run."""
        sizes = axis_sizes(ParallelConfig(), self.world)  # shards alone
        return ShardedModel(self.name, self.config, self._device, Mesh(sizes, self.rank, self._device.type))

    def predict(self, group: Group) -> Tensor:
        """As `Model.predict`. On rank 0, while the others `follow`.

        Raises LeftOut for a group that no correct worker makes.
        """
        longest, count = self.config.generator.max_length, len(group.lengths)
        segments = self.config.agent.most_segments
        check = GroupCheck(count, longest, self._vocabulary, segments=segments, model=self._policy)
        group = _without_columns(group)
        if fault := check.fault(group, LATEST):
            raise LeftOut(fault.reason, fault.text)
        frames = [bytes(frame) for frame in encode_group(group).frames]
        values: Tensor = self.together(PREDICT, frames)
        return values

    def together(self, job: str, value: Any) -> Any:
        """Run a job on all ranks. On rank 0, in any thread, one job after the other."""
        with self._turn:
            if self.world > 1:
                broadcast(msgpack.packb([job, value]))
            return self._jobs[job](value)

    def follow(self) -> None:
        """Ranks above 0: do the jobs of rank 0 until it has closed."""
        while True:
            job, value = msgpack.unpackb(broadcast(None))
            if job == CLOSE:
                return
            with tracing.span("calls", job, tracing.RESOLUTION_S):
                self._jobs[job](value)

    def close(self) -> None:
        """Rank 0: announce the end. While a job is still under way, the others end with this process."""
        self._closed.set()
        if self.world > 1 and self.rank == 0 and self._turn.acquire(timeout=CLOSE_S):
            broadcast(msgpack.packb([CLOSE, None]))

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            self.together(HEARTBEAT, None)

    def _predict(self, frames: list[bytes]) -> Tensor:
        """Collective: each rank takes every world-th pass; they run equally many."""
        batch, world = MicroBatch.of([decode_group(frames)]).by_segment(), self.world
        values = torch.zeros(batch.tokens, *self._model.network.width)
        most = min(self.config.learner.micro_batch_tokens, -(-batch.tokens // world))
        passes = bins(batch, range(batch.rollouts), most, self._shares)
        mine = passes[self.rank :: world]
        for turn in range(-(-len(passes) // world)):
            if turn < len(mine):
                values[batch.tokens_of(mine[turn])] = self._model.predict(batch.select(mine[turn]))
            else:
                self._model.predict(MicroBatch.empty())
        if world > 1:
            dist.all_reduce(values)
        return values


class InferenceModel(PoolModel, PoolWork):
    """`PoolWork` of a model that is not trained: its column has the name of the model."""

    async def columns(self, group: Group) -> Mapping[str, Array]:
        """Raises LeftOut."""
        values = await in_thread(self.predict, group)
        if not torch.isfinite(values).all():
            raise LeftOut(NOT_FINITE, f"the {self.name} gives a log-prob that is not finite")
        return {self.name: values.numpy()}


def _without_columns(group: Group) -> Group:
    """Without the columns that other stages added, and those of steps."""
    return dataclasses.replace(
        group, columns={n: c for n, c in group.columns.items() if n in ("segment", MEDIA)}
    )
