"""The training objective: log-probs of a micro-batch → a sum to differentiate, and everything worth knowing.

    π ── ρ = π/π_p ── loss(ρ, A) ─┐
    π_p ─ w = π_p/μ ─ correction ─┴─▸ Σ weight_N · (w_N · loss_N − bonus · entropy_N)   over the denominator

Axes:  N tokens · R rollouts · P policy tokens (those under the mask)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.config.schema import AlgorithmConfig
from asyncrl.learner.aggregation import AGGREGATIONS, Counts
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.corrections import correction_weights
from asyncrl.learner.losses import LOSSES, PolicyTerms, ratio
from asyncrl.telemetry.metrics import Max, Mean, Metrics, Sum
from asyncrl.types import Version

RATIO_SUM, RATIO_SQUARES, RATIO_TOKENS = "ratio/sum", "ratio/sum_squares", "ratio/tokens"


@dataclass(frozen=True, slots=True)
class Objective:
    """`algorithm:` resolved. norm_tokens: the constant of 'seq-mean-token-sum-norm'."""

    config: AlgorithmConfig
    norm_tokens: int

    def __call__(self, batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, Metrics]:
        """(scalar sum, to be divided by `denominator`; metrics). Both inputs are 0 where the mask is 0."""
        now_N = logp_N.detach()
        proximal_N = batch.behaviour_N if self.config.proximal == "behaviour" else now_N
        terms = PolicyTerms(
            logp_N, proximal_N, batch.advantages_N, batch.loss_mask_N, batch.seq_N, batch.rollouts
        )
        loss = LOSSES[self.config.loss](terms, self.config)
        weight_N = correction_weights(
            proximal_N - batch.behaviour_N,
            batch.loss_mask_N,
            batch.seq_N,
            batch.rollouts,
            self.config.correction,
        )
        per_token_N = weight_N * loss.loss_N
        if self.config.entropy_bonus:
            per_token_N = per_token_N - self.config.entropy_bonus * entropy_N
        share_N = AGGREGATIONS[self.config.aggregation].weights(batch, self.norm_tokens)
        # where, not a product: what stands outside the mask may be infinite, and 0 · ∞ is not 0.
        total = (torch.where(batch.loss_mask_N, per_token_N, 0.0) * share_N).sum()
        return total, token_metrics(batch, now_N, entropy_N.detach(), loss.clipped_N, weight_N)

    def denominator(self, counts: Counts) -> float:
        """Of the global batch; 1 for one without a policy token, whose sum is 0 anyway."""
        return float(max(1, AGGREGATIONS[self.config.aggregation].denominator(counts)))

    @property
    def skips_flat_groups(self) -> bool:
        """Whether a group without advantages adds exactly nothing to the gradient."""
        return self.config.entropy_bonus == 0


def batch_metrics(batch: MicroBatch, version: Version) -> Metrics:
    """Of all rollouts that a step trains on, whether they need a forward or not.

    Staleness of a group: `version` minus the version of its oldest token; staleness/token is the mean over
    tokens.
    """
    metrics = Metrics()
    groups = int(batch.group_R.max()) + 1
    metrics.add("reward/mean", Mean(float(batch.rewards_R.sum()), batch.rollouts))
    metrics.add("groups", Sum(groups))
    metrics.add("rollouts", Sum(batch.rollouts))
    made = Counts.of(batch).tokens
    metrics.add("tokens", Sum(made))
    metrics.add("tokens_with_prompts", Sum(batch.tokens))
    metrics.add("length/mean", Mean(made, batch.rollouts))
    age_P = version - batch.versions_N[batch.loss_mask_N]
    oldest_G = torch.full((groups,), -1, dtype=age_P.dtype)
    oldest_G.scatter_reduce_(0, batch.group_R[batch.seq_N[batch.loss_mask_N]], age_P, "amax")
    aged = oldest_G[oldest_G >= 0]
    metrics.add("staleness/mean", Mean(float(aged.sum()), len(aged)))
    metrics.add("staleness/max", Max(float(max(aged.tolist(), default=0))))
    metrics.add("staleness/token", Mean(float(age_P.sum()), len(age_P)))
    return metrics


def token_metrics(
    batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor, clipped_N: Tensor, weight_N: Tensor
) -> Metrics:
    """How far the current policy is from what made the tokens. All inputs [N], no gradient.

    The divergences are estimates of KL(μ‖π) from μ's own samples: k1 = mean log μ/π; k3 = mean (π/μ − 1 − log
    π/μ), never negative (http://joschu.net/blog/kl-approx.html).
    """
    mask_N = batch.loss_mask_N
    log_ratio_P = (logp_N - batch.behaviour_N)[mask_N]
    ratio_P = ratio(logp_N, batch.behaviour_N)[mask_N]
    count = len(ratio_P)
    sums = torch.stack(
        [
            ratio_P.sum(),
            ratio_P.square().sum(),
            -log_ratio_P.sum(),
            (ratio_P - 1 - log_ratio_P).sum(),
            entropy_N[mask_N].sum(),
            clipped_N[mask_N].sum(),
            (weight_N[mask_N] == 0).sum(),
        ]
    ).tolist()
    metrics = Metrics()
    metrics.add(RATIO_SUM, Sum(sums[0]))
    metrics.add(RATIO_SQUARES, Sum(sums[1]))
    metrics.add(RATIO_TOKENS, Sum(count))
    metrics.add("ratio/max", Max(float(ratio_P.max()) if count else 0.0))
    names = ("kl/k1", "kl/k3", "entropy", "share/clipped", "share/rejected")
    for name, total in zip(names, sums[2:], strict=True):
        metrics.add(name, Mean(total, count))
    return metrics


def with_ratio_summary(values: Mapping[str, float]) -> dict[str, float]:
    """The reduced metrics of a step, with the three ratio sums turned into ratio/mean and ratio/ess: the
    effective sample size (Σw)² / (n Σw²), 1 when all weights are equal."""
    row = dict(values)
    total, squares, count = (row.pop(name, 0.0) for name in (RATIO_SUM, RATIO_SQUARES, RATIO_TOKENS))
    if count:
        row["ratio/mean"] = total / count
        row["ratio/ess"] = total * total / (count * squares) if squares else 0.0
    return row
