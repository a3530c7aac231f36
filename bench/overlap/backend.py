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
from asyncrl.learner.reporting import version_decisions
from asyncrl.learner.training import passes
from asyncrl.sync.tensors.checksum import hash_of_all
from asyncrl.sync.tensors.shards import Shards
from bench.overlap.times import Times

FORWARD = 1 / 3
"""The share of a pass after which its outputs are there. A backward pass has twice the products of a forward pass."""


def load(config: Config, models: Collection[str]) -> FsdpBackend:
    """For `learner.own_backend`."""
    backend, times = FsdpBackend(config, models), Times.of_this_process()
    policy = TimedPolicy(backend.policy, times)
    backend.policy = cast(ShardedModel, policy)
    if times.queued:
        passes.Mark = policy.mark  # type: ignore[misc,assignment]
        version_decisions.hash_of_all = policy.hash_of_all  # type: ignore[assignment]
    return backend


class TimedMark:
    """A `Mark` in the work of the scripted device, which reaches it at `at`."""

    def __init__(self, at: float) -> None:
        self._at = at

    @property
    def reached(self) -> bool:
        return time.monotonic() >= self._at

    def wait(self) -> None:
        time.sleep(max(0.0, self._at - time.monotonic()))


class TimedPolicy:
    """A `Policy` whose log-probs are the recorded ones. Losses are computed; their gradient is dropped.

    A pass takes its time, its loss included, of this thread, as on a CPU; or, if `Times.queued`, of a device that works
    off what it is given, as a GPU does: then this thread waits for it where a learner on a GPU waits, for outputs of
    passes, for the gradient's norm, and for the weights after a step.
    """

    def __init__(self, policy: ShardedModel, times: Times) -> None:
        self._policy, self._times, self._done_at = policy, times, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def predict(self, batch: MicroBatch) -> Tensor:
        return batch.behaviour_N.clone()

    def accumulate(self, batches: Sequence[MicroBatch], loss: Loss) -> None:
        for batch in batches:
            pass_s = self._times.train_token_s * int(batch.loss_mask_N.sum())
            self._begin(FORWARD * pass_s)
            logprobs = batch.behaviour_N.clone().requires_grad_()
            loss(batch, logprobs, torch.zeros_like(logprobs)).backward()
            self._begin((1 - FORWARD) * pass_s)
            if not self._times.queued:
                self._wait()

    def _begin(self, seconds: float) -> None:
        self._done_at = max(self._done_at, time.monotonic()) + seconds

    def _wait(self) -> None:
        TimedMark(self._done_at).wait()

    def mark(self, device: torch.device) -> TimedMark:
        """Behind all work that was queued."""
        return TimedMark(self._done_at)

    def hash_of_all(self, weights: Shards) -> int:
        self._wait()
        return hash_of_all(weights)

    def gradient_norm(self, scale: float) -> float:
        self._wait()
        return scale

    def optimizer_step(self, scale: float, lr: float) -> float:
        self._begin(self._times.step_s)
        if not self._times.queued:
            self._wait()
        return scale

    def forget_gradients(self) -> None:
        """There is none."""
