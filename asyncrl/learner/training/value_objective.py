"""A critic's objective: its values, clipped around those of the version's start, against the returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from asyncrl.learner.algorithms.advantages.segments import column
from asyncrl.learner.algorithms.losses.aggregation import AGGREGATIONS, Counts
from asyncrl.learner.algorithms.losses.values import value_loss
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.telemetry.metrics import Mean, Metrics
from asyncrl.types import Version

TOKEN_MEAN: Final = AGGREGATIONS["token-mean"]


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """name: of the critic · values, returns: columns, V at the version's start and what it is to learn · clip: ε_v"""

    name: str
    values: str
    returns: str
    clip: float | None

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns."""
        return (self.values, self.returns)

    def __call__(self, batch: MicroBatch, values_N: Tensor, version: Version = 0) -> tuple[Tensor, Metrics]:
        """(sum over policy tokens, metrics)."""
        old_N, returns_N = column(batch, self.values), column(batch, self.returns)
        loss = value_loss(values_N, old_N, returns_N, self.clip)
        share_N = TOKEN_MEAN.weights(batch, 1).to(loss.loss_N.dtype)
        total = (torch.where(batch.loss_mask_N, loss.loss_N, 0.0) * share_N).sum()
        metrics, clipped_P = Metrics(), loss.clipped_N[batch.loss_mask_N]
        metrics.add(f"{self.name}/clipped", Mean(float(clipped_P.sum()), len(clipped_P)))
        return total, metrics

    def counts(self, batch: MicroBatch) -> Counts:
        return Counts.of(batch)

    def denominator(self, counts: Counts) -> float:
        return float(max(1, TOKEN_MEAN.denominator(counts)))
