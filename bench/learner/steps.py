"""python -m bench.learner.steps: one rank that trains on the same groups again and again.

It tells how long a step took, from packing to the optimizer, and how much of that was the model's: forward, backward
and optimizer step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from asyncrl.learner.backends.backend import Model
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.reporting.utilization import TrainingFlops, squares
from asyncrl.learner.training.version_step import version_step
from asyncrl.queue.ledger.claims import GroupCost, share_out
from asyncrl.types import Group
from bench.learner.model import config_of, groups_of
from bench.learner.rollouts import samples
from bench.process import CLOCKS, Talk


class Stopwatch:
    """A policy whose `accumulate`, `gradient_norm` and `optimizer_step` are timed, without the losses in between."""

    def __init__(self, policy: Model, clock: Callable[[], float]) -> None:
        self.seconds, self._clock, self._policy = 0.0, clock, policy
        self.gradient_norm = self._timed(policy.gradient_norm, 1)
        self.optimizer_step = self._timed(policy.optimizer_step, 1)

    def accumulate(self, batches: Sequence[MicroBatch], loss: Callable[..., Tensor]) -> None:
        self._timed(self._policy.accumulate, 1)(batches, self._timed(loss, -1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def _timed(self, call: Callable[..., Tensor | float | None], sign: int) -> Callable[..., Tensor]:
        def timed(*args: object) -> object:
            begun = self._clock()
            result = call(*args)
            self.seconds += sign * (self._clock() - begun)
            return result

        return timed  # type: ignore[return-value]


def main() -> None:
    torch.set_num_threads(1)
    talk = Talk()
    said = talk.hears()
    os.environ.update(said["environment"])
    config, clock = config_of(Path(said["folder"])), CLOCKS[said["clock"]]
    groups = groups_of(samples("short", said["groups"], said["scale"]))
    backend = FsdpBackend(config)
    mine = _share(groups, backend.data_rank, backend.data_world, TrainingFlops.of(config.model))
    watch = Stopwatch(backend.policy, clock)
    backend.policy = cast(Any, watch)
    step = version_step(backend, config)
    talk.tell("ready")
    version = 0
    while talk.hears() is not None:
        watch.seconds, begun = 0.0, clock()
        step.add(mine, version)
        done = step.step(version)
        seconds, version = clock() - begun, version + 1
        assert not done.refused, done.refused
        talk.tell({"seconds": seconds, "model_s": watch.seconds, "loss": done.values["train/loss"]})
    backend.close()


def _share(groups: list[Group], rank: int, ranks: int, work: TrainingFlops) -> list[Group]:
    """As the ledger would."""
    loads = [GroupCost(g.tokens, g.tokens + squares(g.lengths.tolist()) / work.even_tokens) for g in groups]
    homes = share_out(loads, ranks, max_tokens=1 << 30)
    return [group for group, home in zip(groups, homes, strict=True) if home == rank]


if __name__ == "__main__":
    main()
