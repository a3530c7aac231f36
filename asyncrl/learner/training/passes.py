"""The passes of a model that learns: forward, objective, backward, micro-batch by micro-batch; and their results.

Accumulator ── learn ─▸ LearningModel ── take_results ─▸ losses, metrics, groups that are not finite
                        ├── LocalModel      in this process, at once
                        └── RemoteModel     in a pool, while the policy trains (`remote_model.py`)
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
from asyncrl.learner.checks.finite_check import nonfinite_outputs
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.telemetry.metrics import Metrics
from asyncrl.types import Version

PADDING = MicroBatch.empty().with_columns(weight=torch.zeros(1), selected=torch.zeros(1, dtype=torch.bool))
"""A micro-batch without policy tokens, which a rank runs while another one has rollouts left."""

Inspect = Callable[[MicroBatch, Tensor], None]
"""Called with each micro-batch and the model's first output for it."""


class Objective(Protocol):
    """(batch, *outputs of the model, version=) → (a sum to differentiate, metrics). The sum over the global batch is
    divided by the `denominator` of the counts there."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Metrics]: ...

    def counts(self, batch: MicroBatch) -> Counts: ...

    def denominator(self, counts: Counts) -> float: ...


@dataclass(frozen=True, slots=True)
class PassResult:
    """loss: the sum that was differentiated · bad: ordinals of groups with values that are not finite"""

    loss: float = 0.0
    bad: frozenset[int] = frozenset()
    metrics: Metrics = field(default_factory=Metrics)

    @staticmethod
    def total(results: Iterable[PassResult]) -> PassResult:
        loss, bad, metrics = 0.0, frozenset[int](), Metrics()
        for result in results:
            loss, bad = loss + result.loss, bad | result.bad
            metrics.merge([result.metrics])
        return PassResult(loss, bad, metrics)

    def to_wire(self) -> list[Any]:
        return [self.loss, sorted(self.bad), self.metrics.to_wire()]

    @staticmethod
    def from_wire(wire: Any) -> PassResult:
        """The inverse of `to_wire`. Raises WireError for anything else."""
        try:
            loss, bad, metrics = wire
            return PassResult(float(loss), frozenset(map(int, bad)), Metrics.from_wire(metrics))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise WireError(f"not what passes have found: {error!r}") from error


class LearningModel(Protocol):
    """Collective: every method; the last three as of `Model`."""

    def learn(
        self,
        objective: Objective,
        batches: Sequence[MicroBatch],
        passes: int,
        version: Version,
        inspect: Inspect | None = None,
    ) -> None:
        """Add the gradient of the objective on this rank's micro-batches. passes: the largest number of them on any
        rank."""
        ...

    def take_results(self, wait: bool) -> PassResult:
        """Results of the passes since the last call. wait: until all passes are done."""
        ...

    def gradient_norm(self, scale: float) -> float: ...

    def optimizer_step(self, scale: float, lr: float) -> float: ...

    def forget_gradients(self) -> None: ...


class LocalModel:
    """`LearningModel` in this process."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._results: list[PassResult] = []

    def learn(
        self,
        objective: Objective,
        batches: Sequence[MicroBatch],
        passes: int,
        version: Version,
        inspect: Inspect | None = None,
    ) -> None:
        self._results += run_passes(self._model, objective, batches, passes, version, inspect)

    def take_results(self, wait: bool) -> PassResult:
        results, self._results = PassResult.total(self._results), []
        return results

    def gradient_norm(self, scale: float) -> float:
        return self._model.gradient_norm(scale)

    def optimizer_step(self, scale: float, lr: float) -> float:
        return self._model.optimizer_step(scale, lr)

    def forget_gradients(self) -> None:
        self._results = []
        self._model.forget_gradients()


def run_passes(
    model: Model,
    objective: Objective,
    batches: Sequence[MicroBatch],
    passes: int,
    version: Version,
    inspect: Inspect | None = None,
) -> list[PassResult]:
    """Collective: add the gradients of these micro-batches, padded to `passes` of them. Returns the results, one per
    micro-batch in their order, on ranks that compute losses; elsewhere nothing."""
    found: list[tuple[Tensor, set[int], Metrics]] = []

    def loss(batch: MicroBatch, *outputs: Tensor) -> Tensor:
        if inspect is not None:
            inspect(batch, outputs[0])
        total, metrics = objective(batch, *outputs, version=version)
        bad = nonfinite_outputs(
            batch, outputs, total.detach(), lambda *alone: objective(*alone, version=version)[0]
        )
        found.append((total.detach(), bad, metrics))
        return total

    model.accumulate([*batches, *[PADDING] * (passes - len(batches))], loss)
    return [PassResult(float(total), frozenset(bad), metrics) for total, bad, metrics in found]
