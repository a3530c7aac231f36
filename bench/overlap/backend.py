"""A learner whose passes take scripted times, for `learner.own_backend`: FSDP2 with a policy that is not computed.

Claims, checks, advantages, packing, losses, the weight stream, checkpoints and metrics are those of any run.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.learner.algorithms.roles import Loss
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.backends.fsdp.sharded import ShardedModel
from asyncrl.learner.data.batch import MicroBatch
from bench.overlap.times import Times


def load(config: Config, models: Collection[str]) -> FsdpBackend:
    """For `learner.own_backend`."""
    backend = FsdpBackend(config, models)
    backend.policy = cast(ShardedModel, TimedPolicy(backend.policy, Times.of_this_process()))
    return backend


class TimedPolicy:
    """A `Policy` whose log-probs are the recorded ones. Losses are computed; their gradient is dropped."""

    def __init__(self, policy: ShardedModel, times: Times) -> None:
        self._policy, self._times = policy, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def predict(self, batch: MicroBatch) -> Tensor:
        return batch.behaviour_N.clone()

    def accumulate(self, batches: Sequence[MicroBatch], loss: Loss) -> None:
        for batch in batches:
            logprobs = batch.behaviour_N.clone().requires_grad_()
            loss(batch, logprobs, torch.zeros_like(logprobs)).backward()
            time.sleep(self._times.train_token_s * int(batch.loss_mask_N.sum()))

    def gradient_norm(self, scale: float) -> float:
        return scale

    def optimizer_step(self, scale: float, lr: float) -> float:
        time.sleep(self._times.step_s)
        return scale

    def forget_gradients(self) -> None:
        """There is none."""
