"""`Drift`: how far the proximal policy has moved from the one that made the tokens.

Axes:  N tokens · R rollouts
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.learner.algorithms.losses.policy_loss import MAX_LOG_RATIO


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
        """log_w_N may have any values outside the mask."""
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
