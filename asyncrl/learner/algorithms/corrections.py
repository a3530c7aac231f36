"""Off-policy corrections: functions of w = π_p / μ that weigh a token's loss or leave the token out.

    w ── kind: truncate, cut out ── normalise ──▸ weight_N     multiplies the loss
    w ── reject ────────────────────────────────▸ keep_N       leaves the loss mask

`high` and `low` bound π_p/μ itself. A token of weight 0 stays in every denominator; a rejected token leaves the
policy's loss mask and denominators, and the other models learn from it all the same.

    token_*                         a token is judged by itself, and left out alone
    seq_sum_* seq_mean_* seq_max_*  a rollout is judged by its policy tokens, and left out whole
    *_k1                            by w = π_p/μ, which is kept inside [reject_low, reject_high]; unset, low is 1 / high
    *_k2 *_k3                       by an estimate of KL(μ‖π_p), ½ log² w or w − 1 − log w, kept up to reject_high

For rejections log w is clamped to ±20. verl's k1 options bound μ/π_p instead.

Axes:  N tokens · R rollouts · K values of any kind
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import CorrectionConfig, Criterion
from asyncrl.learner.algorithms.losses.policy_loss import MAX_LOG_RATIO
from asyncrl.learner.algorithms.reductions import (
    PackedRollouts,
    over_ranks,
    policy_tokens,
    rollout_means,
    rollout_sums,
)
from asyncrl.learner.algorithms.registry import CORRECTIONS, REJECTIONS, Gather, register
from asyncrl.learner.data.batch import MicroBatch

LEAST_MEAN = 1e-8
"""Weights with a smaller mean are not normalised: next to nothing is left to scale."""

ROUNDING: Final = 1e-9
"""Relative tolerance: a mean above its bound by less than this counts as at the bound."""

SOURCE: Final = "https://verl.readthedocs.io/en/latest/algo/rollout_corr.html"


@dataclass(frozen=True, slots=True)
class Drift:
    """The drift of the proximal policy from the one that made the tokens.

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


# --- weights


def correction_weights(drift: Drift, config: CorrectionConfig, gather: Gather | None = None) -> Tensor:
    """[N] weights; meaningless outside the mask.

    At level 'sequence' every token of a rollout has the product over its policy tokens. Logs are clamped to ±20, after
    the sum. gather: given where the tokens are this rank's part of a whole batch, and every rank calls; without it they
    may be any whole rollouts. Raises ValueError without it for `normalise`, which needs the whole batch.
    """
    if gather is None and config.normalise:
        raise ValueError("normalised weights need the tokens of the whole batch, and a gather")
    log_w_N = drift.log_w_N if config.level == "token" else rollout_sums(drift.log_w_N, drift)[drift.seq_N]
    raw_N = log_w_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight_N = CORRECTIONS[config.kind].function(raw_N, config)
    if gather is not None and config.normalise:
        weight_N = weight_N / _mean(weight_N, drift, config, gather)
    return weight_N


def geometric_means(weight_N: Tensor, packed: PackedRollouts) -> Tensor:
    """[N]: every token of a rollout has the geometric mean of the weights of its policy tokens; 0 if any of them is 0
    (verl adds 1e-10 to each)."""
    return rollout_means(weight_N.log(), packed).exp()[packed.seq_N]


@register(CORRECTIONS, "none", source="")
def no_correction(raw_N: Tensor, config: CorrectionConfig) -> Tensor:
    """1 everywhere."""
    return torch.ones_like(raw_N)


@register(
    CORRECTIONS, "tis", source="Truncated importance sampling, https://fengyao.notion.site/off-policy-rl"
)
def tis(raw_N: Tensor, config: CorrectionConfig) -> Tensor:
    """min(w, high)."""
    return raw_N.clamp(max=config.high)


@register(CORRECTIONS, "icepop", source="IcePop, Ring-1T, arXiv 2510.18855")
def icepop(raw_N: Tensor, config: CorrectionConfig) -> Tensor:
    """w inside [low, high], 0 outside: a token (or rollout) too far off is left out."""
    return torch.where((raw_N >= config.low) & (raw_N <= config.high), raw_N, 0.0)


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


# --- rejections: (drift, config, gather) → keep_N bool


def kept(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """[N] bool: the part of the mask that all criteria keep, each of which judges the whole mask.

    gather: used for rejections that need 'batch'; every rank calls then, with its part of the whole batch.
    """
    others = (
        dataclasses.replace(
            config, reject=cast(Criterion, name), reject_low=None, reject_high=high, also_reject={}
        )
        for name, high in config.also_reject.items()
    )
    keep_N = drift.loss_mask_N
    for one in (config, *others):
        keep_N = keep_N & REJECTIONS[one.reject].function(drift, one, gather)
    return keep_N


def unrejected(batch: MicroBatch) -> MicroBatch:
    """The batch without the rejected policy tokens (column `kept`). For the policy alone: critics and the reward model
    learn from them too."""
    kept_N = batch.columns.get("kept")
    return batch if kept_N is None else dataclasses.replace(batch, loss_mask_N=batch.loss_mask_N & kept_N)


@register(REJECTIONS, "none", source="")
def no_rejection(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Nothing is left out."""
    return torch.ones_like(drift.loss_mask_N)


@register(REJECTIONS, "token_k1", source=SOURCE)
def token_k1(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out tokens with π_p/μ outside the bounds."""
    return _within(drift.k1_N, config)


@register(REJECTIONS, "token_k2", source=SOURCE)
def token_k2(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out tokens with ½ log²(π_p/μ) above the bound."""
    return drift.k2_N <= config.reject_high


@register(REJECTIONS, "token_k3", source=SOURCE)
def token_k3(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out tokens with π_p/μ − 1 − log(π_p/μ) above the bound."""
    return drift.k3_N <= config.reject_high


@register(REJECTIONS, "seq_sum_k1", source=SOURCE)
def seq_sum_k1(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts whose product of π_p/μ is outside the bounds."""
    return _within(rollout_sums(drift.k1_N, drift), config)[drift.seq_N]


@register(REJECTIONS, "seq_sum_k2", source=SOURCE)
def seq_sum_k2(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts whose sum of k2 is above the bound."""
    return (rollout_sums(drift.k2_N, drift) <= config.reject_high)[drift.seq_N]


@register(REJECTIONS, "seq_sum_k3", source=SOURCE)
def seq_sum_k3(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts whose sum of k3 is above the bound."""
    return (rollout_sums(drift.k3_N, drift) <= config.reject_high)[drift.seq_N]


@register(REJECTIONS, "seq_mean_k1", source=SOURCE)
def seq_mean_k1(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts whose geometric mean of π_p/μ is outside the bounds."""
    return _within(rollout_means(drift.k1_N, drift), config)[drift.seq_N]


@register(REJECTIONS, "seq_mean_k2", source=SOURCE)
def seq_mean_k2(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts whose mean of k2 is above the bound."""
    return (rollout_means(drift.k2_N, drift) <= config.reject_high)[drift.seq_N]


@register(REJECTIONS, "seq_mean_k3", source=SOURCE)
def seq_mean_k3(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts whose mean of k3 is above the bound."""
    return (rollout_means(drift.k3_N, drift) <= config.reject_high)[drift.seq_N]


@register(REJECTIONS, "seq_max_k1", source=SOURCE)
def seq_max_k1(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts with any π_p/μ outside the bounds.

    verl has no such option.
    """
    outside_N = ~_within(drift.k1_N, config) & drift.loss_mask_N
    return (_maxima(outside_N.float(), drift) == 0)[drift.seq_N]


@register(REJECTIONS, "seq_max_k2", source=SOURCE)
def seq_max_k2(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts whose largest k2 is above the bound."""
    return (_maxima(drift.k2_N, drift) <= config.reject_high)[drift.seq_N]


@register(REJECTIONS, "seq_max_k3", source=SOURCE)
def seq_max_k3(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts whose largest k3 is above the bound."""
    return (_maxima(drift.k3_N, drift) <= config.reject_high)[drift.seq_N]


@register(REJECTIONS, "m2po", source="M2PO, arXiv 2510.01161", needs={"batch"})
def m2po(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out the tokens with the largest log² w of the batch, until its mean over the rest is at most `reject_high`.

    `reject_high` is τ, 0.04 in the paper. Tokens with equal log² w go together; where even the smallest is above τ all
    are left out (AReaL keeps one). Here as in AReaL every token counts. The authors' own code looks only at those that
    have moved on outward (A > 0 and w > 1, or A < 0 and w < 1), caps log² w where the mean of all the capped ones is τ,
    and lets no clip be tighter than 0.3 below and 0.5 above. Every rank gathers log² w of all ranks' tokens, 8 bytes
    each.
    """
    square_N = drift.log_w_N.double() ** 2
    every_K = torch.cat(gather(square_N[drift.loss_mask_N])).sort().values
    # Σ (x − τ) > 0 means that the mean is above τ. From there on each x is above τ, and the sum only rises.
    excess_K = (every_K - config.reject_high * (1 + ROUNDING)).cumsum(0)
    out_K = every_K[excess_K > 0]
    return square_N < out_K[0] if len(out_K) else torch.ones_like(drift.loss_mask_N)


def _maxima(values_N: Tensor, drift: Drift) -> Tensor:
    """[R]: the largest value of each rollout; none may be negative."""
    return values_N.new_zeros(drift.rollouts).scatter_reduce(0, drift.seq_N, values_N, "amax")


def _within(log_w_K: Tensor, config: CorrectionConfig) -> Tensor:
    low = 1 / config.reject_high if config.reject_low is None else config.reject_low
    return (log_w_K >= math.log(low)) & (log_w_K <= math.log(config.reject_high))
