"""Off-policy corrections: a weight per token that multiplies the loss, a function of w = π_p / μ.

    w ── kind: truncate, cut out ── normalise ──▸ weight_N

`high` and `low` bound π_p/μ itself. A token of weight 0 stays in every denominator; a token that `rejections.py` leaves
out does not.

Axes:  N tokens · R rollouts · K weights of tokens or of rollouts
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import CorrectionConfig
from asyncrl.learner.algorithms.drift import Drift
from asyncrl.learner.algorithms.losses.policy_loss import MAX_LOG_RATIO
from asyncrl.learner.algorithms.registry import CORRECTIONS, Gather, correction
from asyncrl.learner.algorithms.segments import over_ranks, policy_tokens, rollout_means, rollout_sums

LEAST_MEAN = 1e-8
"""Weights with a smaller mean are not normalised: next to nothing is left to scale."""


def correction_weights(
    log_w_N: Tensor,
    loss_mask_N: Tensor,
    seq_N: Tensor,
    rollouts: int,
    config: CorrectionConfig,
    gather: Gather | None = None,
) -> Tensor:
    """[N] weights for log_w_N = log π_p − log μ (taken without gradient); meaningless outside the mask.

    At level 'sequence' every token of a rollout has the product over its policy tokens. Logs are clamped to ±20, after
    the sum.

    Args:
        gather: Given where the tokens are this rank's part of a whole batch, and every rank calls. Without it they may
            be any whole rollouts.

    Raises:
        ValueError: `normalise` is set, which needs the whole batch, and there is no gather.
    """
    if gather is None and config.normalise:
        raise ValueError("normalised weights need the tokens of the whole batch, and a gather")
    drift = Drift.of(log_w_N, loss_mask_N, seq_N, rollouts)
    weight_N = CORRECTIONS[config.kind].function(_raw(drift, config), config)
    if gather is not None and config.normalise:
        weight_N = weight_N / _mean(weight_N, drift, config, gather)
    return weight_N


def geometric_means(weight_N: Tensor, loss_mask_N: Tensor, seq_N: Tensor, rollouts: int) -> Tensor:
    """[N]: every token of a rollout has the geometric mean of the weights of its policy tokens; 0 if any of them is 0
    (verl adds 1e-10 to each)."""
    drift = Drift.of(weight_N.log(), loss_mask_N, seq_N, rollouts)
    return rollout_means(drift.log_w_N, drift).exp()[seq_N]


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
    verl). 1 where there is nothing to scale."""
    each_K = (_of_rollouts if config.level == "sequence" else _of_tokens)(weight_N.double(), drift)
    total, count = over_ranks(torch.stack([each_K.sum(), torch.ones_like(each_K).sum()]), gather)
    mean = total / count
    return torch.where(mean > LEAST_MEAN, mean, 1.0).to(weight_N.dtype)


def _of_tokens(weight_N: Tensor, drift: Drift) -> Tensor:
    """[K]: the weight of each policy token."""
    return weight_N[drift.loss_mask_N]


def _of_rollouts(weight_N: Tensor, drift: Drift) -> Tensor:
    """[K]: the weight of each rollout with a policy token; all its tokens have the same."""
    return rollout_means(weight_N, drift)[policy_tokens(drift) > 0]
