"""The implicit reward model's objective: to tell the rollouts that succeed from those that do not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from asyncrl.learner.algorithms.advantages.segments import column
from asyncrl.learner.algorithms.losses.aggregation import Counts, tokens_per_rollout
from asyncrl.learner.algorithms.success import succeeded
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.telemetry.metrics import Mean, Metrics
from asyncrl.types import Version


@dataclass(frozen=True, slots=True)
class OutcomeObjective:
    """Cross-entropy of σ(r(y)) against success, the mean over rollouts; r(y) = β Σ_t (log π_prm − log π_ref), over the
    policy tokens of the rollout. Source: PRIME, arXiv 2502.01456."""

    beta: float

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns."""
        return ("reference", "outcome")

    def __call__(
        self, batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor, version: Version = 0
    ) -> tuple[Tensor, Metrics]:
        """(sum over rollouts, metrics)."""
        reference_N = column(batch, "reference").to(logp_N.dtype)
        implicit_N = torch.where(batch.loss_mask_N, logp_N - reference_N, 0.0)
        reward_R = self.beta * logp_N.new_zeros(batch.rollouts).index_add(0, batch.seq_N, implicit_N)
        success_R = succeeded(batch).to(reward_R.dtype)
        made_R = tokens_per_rollout(batch.loss_mask_N, batch.seq_N, batch.rollouts) > 0
        loss_R = binary_cross_entropy_with_logits(reward_R, success_R, reduction="none")
        right_R = made_R & ((reward_R > 0) == (success_R > 0))
        metrics = Metrics()
        metrics.add("reward_model/accuracy", Mean(float(right_R.sum()), float(made_R.sum())))
        return (loss_R * made_R * batch.copies_R).sum(), metrics

    def counts(self, batch: MicroBatch) -> Counts:
        return Counts.of(batch)

    def denominator(self, counts: Counts) -> float:
        return float(max(1, counts.rollouts))
