"""Off-policy corrections: a weight per token that multiplies the loss, a function of w = π_p / μ.

    w ── kind: truncate, cut out ── normalise ──▸ weight_N

`high` and `low` bound π_p/μ itself. A token of weight 0 stays in every denominator; a token that `rejections.py` leaves
out does not.

Axes:  N tokens · R rollouts · K weights of tokens or of rollouts
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import CorrectionConfig
from asyncrl.learner.algorithms.losses.policy_loss import MAX_LOG_RATIO
from asyncrl.learner.algorithms.registry import CORRECTIONS, Gather, correction
from asyncrl.learner.algorithms.segments import (
    PackedRollouts,
    over_ranks,
    policy_tokens,
    rollout_means,
    rollout_sums,
)

LEAST_MEAN = 1e-8
"""Weights with a smaller mean are not normalised: next to nothing is left to scale."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How far the proximal policy has moved from the one that made the tokens.

    log_w_N = log w = log π_p − log μ, 0 outside the mask, no gradient · loss_mask_N bool · seq_N the rollout of each
    token, of `rollouts` = R
    """

    log_w_N: Tensor
    loss_mask_N: Tensor
    seq_N: Tensor
    rollouts: int

    @staticmethod
    def of(log_w_N: Tensor, packed: PackedRollouts) -> Drift:
        """log_w_N may have any values outside the mask."""
        mask_N = packed.loss_mask_N
        return Drift(torch.where(mask_N, log_w_N.detach(), 0.0), mask_N, packed.seq_N, packed.rollouts)

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


def correction_weights(drift: Drift, config: CorrectionConfig, gather: Gather | None = None) -> Tensor:
    """[N] weights; meaningless outside the mask.

    At level 'sequence' every token of a rollout has the product over its policy tokens. Logs are clamped to ±20, after
    the sum. gather: given where the tokens are this rank's part of a whole batch, and every rank calls; without it they
    may be any whole rollouts. Raises ValueError without it for `normalise`, which needs the whole batch.
    """
    if gather is None and config.normalise:
        raise ValueError("normalised weights need the tokens of the whole batch, and a gather")
    weight_N = CORRECTIONS[config.kind].function(_raw(drift, config), config)
    if gather is not None and config.normalise:
        weight_N = weight_N / _mean(weight_N, drift, config, gather)
    return weight_N


def geometric_means(weight_N: Tensor, packed: PackedRollouts) -> Tensor:
    """[N]: every token of a rollout has the geometric mean of the weights of its policy tokens; 0 if any of them is 0
    (verl adds 1e-10 to each)."""
    return rollout_means(weight_N.log(), packed).exp()[packed.seq_N]


@correction("none", source="")
def no_correction(raw_N: Tensor, config: CorrectionConfig) -> Tensor:
    """1 everywhere."""
    return torch.ones_like(raw_N)


@correction("tis", source="Truncated importance sampling, https://fengyao.notion.site/off-policy-rl")
def tis(raw_N: Tensor, config: CorrectionConfig) -> Tensor:
    """min(w, high)."""
    return raw_N.clamp(max=config.high)


@correction("icepop", source="IcePop, Ring-1T, arXiv 2510.18855")
def icepop(raw_N: Tensor, config: CorrectionConfig) -> Tensor:
    """w inside [low, high], 0 outside: a token (or rollout) too far off is left out."""
    return torch.where((raw_N >= config.low) & (raw_N <= config.high), raw_N, 0.0)


def _raw(drift: Drift, config: CorrectionConfig) -> Tensor:
    log_w_N = drift.log_w_N if config.level == "token" else rollout_sums(drift.log_w_N, drift)[drift.seq_N]
    return log_w_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _mean(weight_N: Tensor, drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """The mean weight of the batch, after `kind`: over its tokens or, at level 'sequence', over its rollouts (as in
    verl), whose tokens have the same weight. 1 where there is nothing to scale."""
    if config.level == "sequence":
        each_K = rollout_means(weight_N.double(), drift)[policy_tokens(drift) > 0]
    else:
        each_K = weight_N.double()[drift.loss_mask_N]
    total, count = over_ranks(torch.stack([each_K.sum(), torch.ones_like(each_K).sum()]), gather)
    mean = total / count
    return torch.where(mean > LEAST_MEAN, mean, 1.0).to(weight_N.dtype)
