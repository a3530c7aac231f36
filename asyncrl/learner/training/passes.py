"""The passes of a model that learns: forward, objective, backward, micro-batch by micro-batch; and what they found.

Accumulator ── learn ─▸ LearningModel ── found ─▸ losses, metrics, groups that are not finite
                        ├── Here            in this process, at once
                        └── PooledModel     on a pool, while the policy trains (`remote_model.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncrl.errors import WireError
from asyncrl.learner.algorithms.losses.aggregation import Counts
from asyncrl.learner.backends.backend import Model
from asyncrl.learner.checks.finite_check import blamed
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.telemetry.metrics import Metrics
from asyncrl.types import Version

NOBODY = MicroBatch.empty().with_columns(weight=torch.zeros(1), selected=torch.zeros(1, dtype=torch.bool))
"""What a rank runs while another has rollouts left. Nothing of a whole batch is picked from it."""

Look = Callable[[MicroBatch, Tensor], None]
"""Is shown each micro-batch, and the first of what the model says of it."""


class Objective(Protocol):
    """(batch, what the model says of it, version=) → (a sum to differentiate, metrics). The sum over the global batch
    is divided by the `denominator` of what it counts there."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Metrics]: ...

    def counts(self, batch: MicroBatch) -> Counts: ...

    def denominator(self, counts: Counts) -> float: ...


@dataclass(frozen=True, slots=True)
class PassResult:
    """loss: the sum that was differentiated · bad: ordinals of groups that made something not finite"""

    loss: float = 0.0
    bad: frozenset[int] = frozenset()
    metrics: Metrics = field(default_factory=Metrics)

    @staticmethod
    def total(every: Iterable[PassResult]) -> PassResult:
        loss, bad, metrics = 0.0, frozenset[int](), Metrics()
        for found in every:
            loss, bad = loss + found.loss, bad | found.bad
            metrics.merge([found.metrics])
        return PassResult(loss, bad, metrics)

    def to_wire(self) -> list[Any]:
        return [self.loss, sorted(self.bad), self.metrics.to_wire()]

    @staticmethod
    def from_wire(wire: Any) -> PassResult:
        """Raises WireError for what `to_wire` does not give."""
        try:
            loss, bad, metrics = wire
            return PassResult(float(loss), frozenset(map(int, bad)), Metrics.from_wire(metrics))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise WireError(f"not what passes have found: {error!r}") from error


class LearningModel(Protocol):
    """∀ All of these; the last three as `Model` has them."""

    def learn(
        self,
        objective: Objective,
        batches: Sequence[MicroBatch],
        passes: int,
        version: Version,
        look: Look | None = None,
    ) -> None:
        """Add the gradient of the objective on this rank's micro-batches. passes: of the rank that has most of them."""
        ...

    def found(self, wait: bool) -> PassResult:
        """What passes have found since this was asked last. wait: for all of them."""
        ...

    def gradient_norm(self, scale: float) -> float: ...

    def optimizer_step(self, scale: float, lr: float) -> float: ...

    def forget_gradients(self) -> None: ...


class LocalModel:
    """`LearningModel` of a model that this process holds its part of."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._found: list[PassResult] = []

    def learn(
        self,
        objective: Objective,
        batches: Sequence[MicroBatch],
        passes: int,
        version: Version,
        look: Look | None = None,
    ) -> None:
        self._found += run_passes(self._model, objective, batches, passes, version, look)

    def found(self, wait: bool) -> PassResult:
        found, self._found = PassResult.total(self._found), []
        return found

    def gradient_norm(self, scale: float) -> float:
        return self._model.gradient_norm(scale)

    def optimizer_step(self, scale: float, lr: float) -> float:
        return self._model.optimizer_step(scale, lr)

    def forget_gradients(self) -> None:
        self._found = []
        self._model.forget_gradients()


def run_passes(
    model: Model,
    objective: Objective,
    batches: Sequence[MicroBatch],
    passes: int,
    version: Version,
    look: Look | None = None,
) -> list[PassResult]:
    """∀ Add the gradients of these micro-batches, and of nobody's where other ranks have more. Where the losses are
    computed: what was found, micro-batch by micro-batch in their order; elsewhere nothing."""
    losses: list[Tensor] = []
    beside: list[tuple[set[int], Metrics]] = []

    def loss(batch: MicroBatch, *said: Tensor) -> Tensor:
        if look is not None:
            look(batch, said[0])
        total, metrics = objective(batch, *said, version=version)
        bad = blamed(batch, said, total.detach(), lambda *alone: objective(*alone, version=version)[0])
        losses.append(total.detach())
        beside.append((bad, metrics))
        return total

    model.accumulate([*batches, *[NOBODY] * (passes - len(batches))], loss)
    return [
        PassResult(float(loss), frozenset(bad), metrics)
        for loss, (bad, metrics) in zip(losses, beside, strict=True)
    ]
