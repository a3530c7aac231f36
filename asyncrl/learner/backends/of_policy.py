"""What every backend passes on to its policy, and to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from asyncrl.learner import ranks
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.models.roles import Loss


class OfPolicy:
    """A part of `Backend`. _policy: a `Model` that also says `predict_next`."""

    world: int
    _policy: Any

    def accumulate(self, batches: Sequence[MicroBatch], loss: Loss) -> None:
        self._policy.accumulate(batches, loss)

    def predict(self, batch: MicroBatch) -> Tensor:
        said: Tensor = self._policy.predict(batch)
        return said

    def predict_next(self, batch: MicroBatch) -> Tensor:
        said: Tensor = self._policy.predict_next(batch)
        return said

    def gradient_norm(self, scale: float) -> float:
        norm: float = self._policy.gradient_norm(scale)
        return norm

    def optimizer_step(self, scale: float, lr: float) -> float:
        norm: float = self._policy.optimizer_step(scale, lr)
        return norm

    def forget_gradients(self) -> None:
        self._policy.forget_gradients()

    def exchange(self, value: Any) -> list[Any]:
        return [value] if self.world == 1 else ranks.exchange(value)
