"""`Drift`: how far the proximal policy has moved from the one that made the tokens.

Axes:  N tokens · R rollouts
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.learner.algorithms.losses.losses import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class Drift:
    """log_w_N = log w = log π_p − log μ, 0 outside the mask, no gradient · loss_mask_N bool · seq_N the rollout of each
    token, of `rollouts` = R."""

    log_w_N: Tensor
    loss_mask_N: Tensor
    seq_N: Tensor
    rollouts: int

    @staticmethod
    def of(log_w_N: Tensor, loss_mask_N: Tensor, seq_N: Tensor, rollouts: int) -> Drift:
        """Whatever log_w_N says outside the mask."""
        return Drift(torch.where(loss_mask_N, log_w_N.detach(), 0.0), loss_mask_N, seq_N, rollouts)

    @property
    def k1_N(self) -> Tensor:
        """log w, clamped to ±20. (As an estimate of KL(μ‖π_p) it would have a minus.)"""
        return self.log_w_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @property
    def k2_N(self) -> Tensor:
        """½ log² w."""
        return 0.5 * self.k1_N**2

    @property
    def k3_N(self) -> Tensor:
        """w − 1 − log w."""
        return torch.expm1(self.k1_N) - self.k1_N

    def sums(self, values_N: Tensor) -> Tensor:
        """[R]: over the policy tokens of each rollout, of values that are 0 outside the mask."""
        return values_N.new_zeros(self.rollouts).index_add(0, self.seq_N, values_N)

    def means(self, values_N: Tensor) -> Tensor:
        """[R]: likewise; 0 for a rollout without a policy token."""
        return self.sums(values_N) / self.tokens(values_N).clamp(min=1)

    def maxima(self, values_N: Tensor) -> Tensor:
        """[R]: likewise, of values that are never negative."""
        return values_N.new_zeros(self.rollouts).scatter_reduce(0, self.seq_N, values_N, "amax")

    def tokens(self, like: Tensor) -> Tensor:
        """[R] of the type of `like`: how many policy tokens each rollout has."""
        return self.sums(self.loss_mask_N.to(like.dtype))
