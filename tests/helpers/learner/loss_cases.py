"""Terms of policy losses, and what becomes of a loss in the end, for the tests of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.corrections import Drift
from asyncrl.learner.algorithms.losses.aggregation import AGGREGATIONS, Counts
from asyncrl.learner.algorithms.losses.policy_loss import PolicyTerms, policy_loss
from asyncrl.learner.data.batch import MicroBatch

TOKENS = ("ppo", "decoupled_ppo", "cispo", "sapo", "aipo", "reinforce", "dro", "dppo_tv", "dppo_kl")
ROLLOUTS = ("gspo", "gmpo", "sppo")
SELECTING = ("clip_cov", "kl_cov")
EVERY_LOSS = TOKENS + ROLLOUTS + SELECTING


def f64(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def drift_of(log_w_N: Tensor, seq: Sequence[int], mask: Sequence[bool] | None = None) -> Drift:
    """Tokens of the rollouts `seq`, all of them the policy's unless told."""
    mask_N = torch.tensor(mask or [True] * len(seq))
    return Drift.of(log_w_N, Drift(log_w_N, mask_N, torch.tensor(seq), max(seq) + 1))


def terms_of(
    batch: MicroBatch, logp_N: Tensor, proximal_N: Tensor | None = None, selected_N: Tensor | None = None
) -> PolicyTerms:
    """π_p is μ unless told."""
    return PolicyTerms(
        logp_N=logp_N,
        proximal_N=batch.behaviour_N if proximal_N is None else proximal_N,
        behaviour_N=batch.behaviour_N,
        advantages_N=batch.advantages_N,
        loss_mask_N=batch.loss_mask_N,
        seq_N=batch.seq_N,
        rollouts=batch.rollouts,
        selected_N=selected_N,
    )


def tokens(
    ratios: Sequence[float],
    advantages: Sequence[float],
    log_mu: float = -1.0,
    log_proximal: float | None = None,
    seq: Sequence[int] | None = None,
    selected: Sequence[bool] | None = None,
) -> PolicyTerms:
    """Policy tokens with these ρ = π/π_p, all of one rollout unless `seq` says otherwise; π_p is μ unless told."""
    count = len(ratios)
    proximal_N = torch.full((count,), log_mu if log_proximal is None else log_proximal, dtype=torch.float64)
    owners = list(seq or [0] * count)
    return PolicyTerms(
        logp_N=(proximal_N + f64(ratios).log()).requires_grad_(),
        proximal_N=proximal_N,
        behaviour_N=torch.full((count,), log_mu, dtype=torch.float64),
        advantages_N=f64(advantages),
        loss_mask_N=torch.ones(count, dtype=torch.bool),
        seq_N=torch.tensor(owners),
        rollouts=max(owners) + 1,
        selected_N=None if selected is None else torch.tensor(selected),
    )


class Outcome(NamedTuple):
    """Per token: the loss, the derivative of the sum of all losses by its log π, and whether it was held back."""

    loss: list[float]
    slope: list[float]
    clipped: list[bool]


def outcome(terms: PolicyTerms, config: AlgorithmConfig) -> Outcome:
    loss_N, clipped_N = policy_loss(terms, config)
    (slope_N,) = torch.autograd.grad(loss_N.sum(), terms.logp_N)
    return Outcome(loss_N.tolist(), slope_N.tolist(), clipped_N.tolist())


def weighted_sum(loss_N: Tensor, batch: MicroBatch, aggregation: str, norm_tokens: int = 9) -> Tensor:
    """What a micro-batch adds to the numerator."""
    share_N = AGGREGATIONS[aggregation].weights(batch, norm_tokens)
    return (torch.where(batch.loss_mask_N, loss_N, 0.0) * share_N).sum()


def aggregated(loss_N: Tensor, batch: MicroBatch, aggregation: str) -> Tensor:
    """The loss of a batch that is the whole one."""
    denominator = AGGREGATIONS[aggregation].denominator(Counts.of(batch))
    return weighted_sum(loss_N, batch, aggregation) / max(1, denominator)
