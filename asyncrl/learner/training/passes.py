"""The passes of a model that learns: forward, objective, backward, micro-batch by micro-batch; and their results.

Accumulator ── learn ─▸ LearningModel ── take_results ─▸ losses, metrics, groups that are not finite
                        ├── LocalModel      in this process: `Passes`
                        └── RemoteModel     in a pool, while the policy trains (`remote_model.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncrl.device.accelerator import CPU
from asyncrl.device.copies import Mark, on_host
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
    """(batch, *outputs of the model, version=) → (a sum to differentiate, metrics), on the CPU; `total`, the sum alone,
    on any device. The sum over the global batch is divided by the `denominator` of the counts there. The sums over any
    micro-batches of rollouts of `divided(batch)` make up that over the batch."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Metrics]: ...

    def total(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def counts(self, batch: MicroBatch) -> Counts: ...

    def divided(self, batch: MicroBatch) -> MicroBatch: ...

    def denominator(self, counts: Counts) -> float: ...


@dataclass(frozen=True, slots=True)
class PassResult:
    """loss: the sum that was differentiated · bad: ordinals of groups with values that are not finite · metrics:
    computes them, maybe after the optimizer step"""

    loss: float = 0.0
    bad: frozenset[int] = frozenset()
    metrics: Callable[[], Metrics] = Metrics

    @staticmethod
    def total(results: Iterable[PassResult]) -> PassResult:
        every = list(results)
        loss = sum((result.loss for result in every), 0.0)
        bad = frozenset[int]().union(*(result.bad for result in every))
        return PassResult(loss, bad, lambda: Metrics.of(result.metrics() for result in every))

    def to_wire(self) -> list[Any]:
        return [self.loss, sorted(self.bad), self.metrics().to_wire()]

    @staticmethod
    def from_wire(wire: Any) -> PassResult:
        """The inverse of `to_wire`. Raises WireError for anything else."""
        try:
            loss, bad, metrics = wire
            found = Metrics.from_wire(metrics)
            return PassResult(float(loss), frozenset(map(int, bad)), lambda: found)
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
        """Results of the passes that are done since the last call. wait: until all passes are."""
        ...

    def gradient_norm(self, scale: float) -> float: ...

    def optimizer_step(self, scale: float, lr: float) -> float: ...

    def forget_gradients(self) -> None: ...


class LocalModel:
    """`LearningModel` in this process."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._passes: list[Passes] = []

    def learn(
        self,
        objective: Objective,
        batches: Sequence[MicroBatch],
        passes: int,
        version: Version,
        inspect: Inspect | None = None,
    ) -> None:
        self._passes.append(Passes(self._model, objective, batches, passes, version, inspect))

    def take_results(self, wait: bool) -> PassResult:
        done = [each for each in self._passes if wait or each.done]
        self._passes = [each for each in self._passes if each not in done]
        return PassResult.total(result for each in done for result in each.results())

    def gradient_norm(self, scale: float) -> float:
        return self._model.gradient_norm(scale)

    def optimizer_step(self, scale: float, lr: float) -> float:
        return self._model.optimizer_step(scale, lr)

    def forget_gradients(self) -> None:
        self._passes = []
        self._model.forget_gradients()


class Passes:
    """Collective: the gradients of these micro-batches are added, padded to `passes` of them.

        device   forward ─▸ total ─▸ backward     forward ─▸ total ─▸ backward     …
                    └── outputs, sum ─┐              └── outputs, sum ─┐
        CPU                           └──────────────────▸ `results`: values that are not finite, `inspect`; metrics

    A GPU works on while this thread prepares what follows: only `results` waits for it.
    """

    def __init__(
        self,
        model: Model,
        objective: Objective,
        batches: Sequence[MicroBatch],
        passes: int,
        version: Version,
        inspect: Inspect | None = None,
    ) -> None:
        self._objective, self._version, self._inspect = objective, version, inspect
        self._batches = [*batches, *[_padding(batches)] * (passes - len(batches))]
        self._found: list[tuple[Tensor, list[Tensor]]] = []  # by micro-batch: the sum, the model's outputs
        self._mark = Mark(CPU)
        model.accumulate(self._batches, self._total)

    def _total(self, batch: MicroBatch, *outputs: Tensor) -> Tensor:
        total = self._objective.total(batch, *outputs, version=self._version)
        self._found.append((on_host(total), [on_host(values) for values in outputs]))
        self._mark = Mark(total.device)
        return total

    @property
    def done(self) -> bool:
        """Whether `results` does not wait."""
        return self._mark.reached

    def results(self) -> list[PassResult]:
        """One per micro-batch in their order, on ranks that compute losses; elsewhere nothing."""
        self._mark.wait()
        return [self._result(batch, *found) for batch, found in zip(self._batches, self._found, strict=False)]

    def _result(self, batch: MicroBatch, total: Tensor, outputs: Sequence[Tensor]) -> PassResult:
        if self._inspect is not None:
            self._inspect(batch, outputs[0])

        def loss_of(some: MicroBatch, *theirs: Tensor) -> Tensor:
            return self._objective.total(some, *theirs, version=self._version)

        def metrics() -> Metrics:
            return self._objective(batch, *outputs, version=self._version)[1]

        bad = nonfinite_outputs(batch, outputs, total, loss_of)
        return PassResult(float(total), frozenset(bad), metrics)


def _padding(batches: Sequence[MicroBatch]) -> MicroBatch:
    """PADDING with the columns that objectives read, where there are some to go by: a look whether it may lack them
    would wait for a GPU."""
    some = batches[0].columns if batches else {}
    zeros = {
        name: values.new_zeros(1, *values.shape[1:])
        for name, values in some.items()
        if values.is_floating_point()
    }
    return PADDING.with_columns(**{**zeros, **PADDING.columns})
