"""Metric values that can be merged over micro-batches, ranks and processes.

>>> step = Metrics()
>>> step.add("reward", Mean(3.0, 4)); step.add("reward", Mean(1.0, 4)); step.add("oldest", Max(2))
>>> step.values()
{'reward': 0.5, 'oldest': 2.0}
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

ROUNDING = 1e-9
"""A difference of two sums that is smaller than this share of them is a rounding error."""


class Summed:
    """A metric whose fields are sums: two are merged by adding them."""

    __slots__: tuple[str, ...] = ()

    def merge(self, other: Self) -> Self:
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Mean(Summed):
    """The mean of `count` values with this sum; 0 for none."""

    total: float
    count: float = 1.0

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Sum(Summed):
    value: float


@dataclass(frozen=True, slots=True)
class Max:
    value: float

    def merge(self, other: Self) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Min:
    value: float

    def merge(self, other: Self) -> Min:
        return Min(min(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Deviation(Summed):
    """The standard deviation √(Σx²/n − (Σx/n)²) of n values; 0 for none, and for values that differ by rounding errors
    only."""

    total: float
    squares: float
    count: float

    @property
    def value(self) -> float:
        spread = self.squares * self.count - self.total**2
        return math.sqrt(spread) / self.count if spread > ROUNDING * self.squares * self.count else 0.0


@dataclass(frozen=True, slots=True)
class EffectiveShare(Summed):
    """The effective sample size of n weights as a share of n, (Σw)² / (n Σw²): 1 if all are equal."""

    total: float
    squares: float
    count: float

    @property
    def value(self) -> float:
        return self.total**2 / (self.count * self.squares) if self.squares else 0.0


@dataclass(frozen=True, slots=True)
class ExplainedVariance(Summed):
    """1 − Var(target − prediction) / Var(target) over n pairs, from sums of targets, errors and their squares; 0 if the
    targets vary by rounding errors only."""

    targets: float
    target_squares: float
    errors: float
    error_squares: float
    count: float

    @property
    def value(self) -> float:
        spread = self.target_squares * self.count - self.targets**2
        left = self.error_squares * self.count - self.errors**2
        return 1 - left / spread if spread > ROUNDING * self.target_squares * self.count else 0.0


Metric = Mean | Sum | Max | Min | Deviation | EffectiveShare | ExplainedVariance
KINDS: dict[str, type[Metric]] = {
    kind.__name__: kind for kind in (Mean, Sum, Max, Min, Deviation, EffectiveShare, ExplainedVariance)
}


class Metrics:
    """Metrics by name. Adding to a name merges metrics of the same kind."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    @staticmethod
    def of(parts: Iterable[Metrics]) -> Metrics:
        """The metrics of all parts, merged."""
        metrics = Metrics()
        metrics.merge(parts)
        return metrics

    def add(self, name: str, metric: Metric) -> None:
        have = self._metrics.get(name)
        if have is None:
            self._metrics[name] = metric
        elif type(have) is type(metric):
            self._metrics[name] = have.merge(metric)  # type: ignore[arg-type]
        else:
            raise TypeError(f"metric {name}: {type(metric).__name__} added to {type(have).__name__}")

    def merge(self, others: Iterable[Metrics]) -> None:
        """Add the metrics of other ranks or processes."""
        for other in others:
            for name, metric in other._metrics.items():
                self.add(name, metric)

    def to_wire(self) -> dict[str, list[Any]]:
        """Plain msgpack-able values: {name: [kind, *fields]}."""
        return {
            name: [type(metric).__name__, *dataclasses.astuple(metric)]
            for name, metric in self._metrics.items()
        }

    @staticmethod
    def from_wire(value: Mapping[str, Sequence[Any]]) -> Metrics:
        metrics = Metrics()
        for name, (kind, *fields) in value.items():
            metrics.add(name, KINDS[kind](*fields))
        return metrics

    def values(self) -> dict[str, float]:
        return {name: float(metric.value) for name, metric in self._metrics.items()}
