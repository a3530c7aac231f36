"""Policy losses: log-probs and advantages → a loss per token.

Three policies are kept apart: behaviour μ (made the tokens), proximal π_p (what the trust region is around)
and current π. ρ = π / π_p is the ratio of most losses. The off-policy weight w = π_p / μ is no business of a loss
(but of the few that say so): `corrections.py` multiplies it in.

    ratio_losses.py        the loss of a token depends on its own ratio
    sequence_losses.py     on the ratio of its whole rollout
    divergence_losses.py   on how far π has moved from μ at this token
    covariance_losses.py   on which tokens of the batch move the entropy most

A new loss is a function under its literal there, the literal in `AlgorithmConfig.loss`, and a test with numbers.

Axes:  N tokens · R rollouts
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.registry import loss_of
from asyncrl.learner.data.batch import MicroBatch

MAX_LOG_RATIO = 20.0
"""exp of more than this is no information, only an overflow further on."""


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """What a loss is made of.

    logp_N        log π, with its gradient; the others have none
    proximal_N    log π_p · behaviour_N log μ · advantages_N · loss_mask_N bool
    seq_N         the rollout of each token, of `rollouts` = R
    selected_N    bool, what `covariance_losses.select_covariance` has picked from the whole batch; None: not asked
    """

    logp_N: Tensor
    proximal_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    loss_mask_N: Tensor
    seq_N: Tensor
    rollouts: int
    selected_N: Tensor | None = None

    @classmethod
    def of(cls, batch: MicroBatch, logp_N: Tensor, proximal_N: Tensor) -> Self:
        return cls(
            logp_N=logp_N,
            proximal_N=proximal_N,
            behaviour_N=batch.behaviour_N,
            advantages_N=batch.advantages_N,
            loss_mask_N=batch.loss_mask_N,
            seq_N=batch.seq_N,
            rollouts=batch.rollouts,
            selected_N=batch.columns.get("selected"),
        )

    def inside(self) -> Self:
        """The same with 0 outside the mask, so that nothing there can spoil a value or a gradient."""
        mask_N = self.loss_mask_N
        return dataclasses.replace(
            self,
            logp_N=torch.where(mask_N, self.logp_N, 0.0),
            proximal_N=torch.where(mask_N, self.proximal_N, 0.0),
            behaviour_N=torch.where(mask_N, self.behaviour_N, 0.0),
            advantages_N=torch.where(mask_N, self.advantages_N, 0.0),
        )


class TokenLoss(NamedTuple):
    """loss_N with its gradient, and clipped_N bool: the tokens that the loss holds back."""

    loss_N: Tensor
    clipped_N: Tensor


def policy_loss(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """The loss of `algorithm.loss`, before corrections and aggregation. What stands outside the mask never matters, and
    neither does what this says there."""
    return loss_of(config).function(terms.inside(), config)


def ratio(logp_N: Tensor, other_N: Tensor) -> Tensor:
    """exp(logp − other), the log clamped to ±20."""
    return log_ratio(logp_N, other_N).exp()


def log_ratio(logp_N: Tensor, other_N: Tensor) -> Tensor:
    """logp − other, clamped to ±20."""
    return (logp_N - other_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def none_of(terms: PolicyTerms) -> Tensor:
    """[N] bool: no token."""
    return torch.zeros_like(terms.loss_mask_N)


def rollout_sums(values_N: Tensor, terms: PolicyTerms) -> Tensor:
    """[R]: the sum over the policy tokens of each rollout, with its gradient."""
    kept_N = torch.where(terms.loss_mask_N, values_N, 0.0)
    return kept_N.new_zeros(terms.rollouts).index_add(0, terms.seq_N, kept_N)


def policy_tokens(terms: PolicyTerms) -> Tensor:
    """[R] of the log-probs' type: how many tokens of each rollout the policy made, but at least 1."""
    return rollout_sums(torch.ones_like(terms.logp_N), terms).clamp(min=1)


def rollout_means(values_N: Tensor, terms: PolicyTerms) -> Tensor:
    """[R]: the mean over the policy tokens of each rollout, with its gradient; 0 where there is none."""
    return rollout_sums(values_N, terms) / policy_tokens(terms)
