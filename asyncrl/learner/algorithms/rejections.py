"""Rejection masks: tokens are left out where the proximal policy is too far from the policy that made them.

    token_*                         a token is judged by itself, and left out alone
    seq_sum_* seq_mean_* seq_max_*  a rollout is judged by its policy tokens, and left out whole
    *_k1                            by w = π_p/μ, which is kept inside [reject_low, reject_high]; unset, low is 1 / high
    *_k2 *_k3                       by an estimate of KL(μ‖π_p), ½ log² w or w − 1 − log w, kept up to reject_high

Log w is clamped to ±20. verl's k1 options bound μ/π_p instead. Each function: (drift, config, gather) → keep_N bool.
Rejected tokens leave the policy's loss mask and denominators; the other models learn from them all the same.

Axes:  N tokens · K values of any kind
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import CorrectionConfig
from asyncrl.learner.algorithms.corrections import Drift
from asyncrl.learner.algorithms.registry import REJECTIONS, Gather, rejection
from asyncrl.learner.algorithms.segments import rollout_means, rollout_sums
from asyncrl.learner.data.batch import MicroBatch

ROUNDING: Final = 1e-9
"""Relative tolerance: a mean above its bound by less than this counts as at the bound."""

SOURCE: Final = "https://verl.readthedocs.io/en/latest/algo/rollout_corr.html"


def kept(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """[N] bool: the part of the mask that `correction.reject` keeps. gather: used for rejections that need 'batch';
    every rank calls then, with its part of the whole batch."""
    return drift.loss_mask_N & REJECTIONS[config.reject].function(drift, config, gather)


def unrejected(batch: MicroBatch) -> MicroBatch:
    """The batch without the rejected policy tokens (column `kept`). For the policy alone: critics and the reward model
    learn from them too."""
    kept_N = batch.columns.get("kept")
    return batch if kept_N is None else dataclasses.replace(batch, loss_mask_N=batch.loss_mask_N & kept_N)


@rejection("none", source="")
def no_rejection(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Nothing is left out."""
    return torch.ones_like(drift.loss_mask_N)


@rejection("token_k1", source=SOURCE)
def token_k1(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out tokens with π_p/μ outside the bounds."""
    return _within(drift.k1_N, config)


@rejection("token_k2", source=SOURCE)
def token_k2(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out tokens with ½ log²(π_p/μ) above the bound."""
    return drift.k2_N <= config.reject_high


@rejection("token_k3", source=SOURCE)
def token_k3(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out tokens with π_p/μ − 1 − log(π_p/μ) above the bound."""
    return drift.k3_N <= config.reject_high


@rejection("seq_sum_k1", source=SOURCE)
def seq_sum_k1(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts whose product of π_p/μ is outside the bounds."""
    return _within(rollout_sums(drift.k1_N, drift), config)[drift.seq_N]


@rejection("seq_sum_k2", source=SOURCE)
def seq_sum_k2(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts whose sum of k2 is above the bound."""
    return (rollout_sums(drift.k2_N, drift) <= config.reject_high)[drift.seq_N]


@rejection("seq_sum_k3", source=SOURCE)
def seq_sum_k3(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts whose sum of k3 is above the bound."""
    return (rollout_sums(drift.k3_N, drift) <= config.reject_high)[drift.seq_N]


@rejection("seq_mean_k1", source=SOURCE)
def seq_mean_k1(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts whose geometric mean of π_p/μ is outside the bounds."""
    return _within(rollout_means(drift.k1_N, drift), config)[drift.seq_N]


@rejection("seq_mean_k2", source=SOURCE)
def seq_mean_k2(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts whose mean of k2 is above the bound."""
    return (rollout_means(drift.k2_N, drift) <= config.reject_high)[drift.seq_N]


@rejection("seq_mean_k3", source=SOURCE)
def seq_mean_k3(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts whose mean of k3 is above the bound."""
    return (rollout_means(drift.k3_N, drift) <= config.reject_high)[drift.seq_N]


@rejection("seq_max_k1", source=SOURCE)
def seq_max_k1(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts with any π_p/μ outside the bounds.

    verl has no such option.
    """
    outside_N = ~_within(drift.k1_N, config) & drift.loss_mask_N
    return (_maxima(outside_N.float(), drift) == 0)[drift.seq_N]


@rejection("seq_max_k2", source=SOURCE)
def seq_max_k2(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts whose largest k2 is above the bound."""
    return (_maxima(drift.k2_N, drift) <= config.reject_high)[drift.seq_N]


@rejection("seq_max_k3", source=SOURCE)
def seq_max_k3(drift: Drift, config: CorrectionConfig, gather: Gather) -> Tensor:
    """Leave out rollouts whose largest k3 is above the bound."""
    return (_maxima(drift.k3_N, drift) <= config.reject_high)[drift.seq_N]


@rejection("m2po", source="M2PO, arXiv 2510.01161", needs={"batch"})
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
