"""Policy losses: log-probs and advantages → a loss per token.

Three policies are kept apart: behaviour μ (made the tokens), proximal π_p (the centre of the trust region) and
current π. ρ = π / π_p is the ratio of most losses. `PolicyObjective` multiplies the loss by the off-policy weight
w = π_p / μ of `corrections.py`. A few losses apply w themselves; their docstrings state it.

    ratio_losses.py        the loss of a token depends on its ratio, that of its rollout, or the divergence at it
    covariance_losses.py   … on whether it moves the entropy more than others of the batch

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
from asyncrl.types import Version

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20: the exponential of more would overflow in sums."""

MAX_K3 = 10.0


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """The inputs of a loss.

    logp_N        log π, with its gradient; the others have none
    proximal_N    log π_p · behaviour_N log μ · advantages_N · loss_mask_N bool
    seq_N         the rollout of each token, of `rollouts` = R
    selected_N    bool, the tokens that `covariance_losses.select_covariance` selected; None for other losses
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
    """The loss of `algorithm.loss`, before corrections and aggregation. Inputs outside the mask never matter, nor do
    outputs there."""
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


def kl(logp_N: Tensor, other_N: Tensor, form: str) -> Tensor:
    """[N]: the estimate of KL(π‖π_other) at each token, with the gradient of logp_N.

    form, with r = π_other / π: k1 = −log r, k2 = ½ log² r, k3 = r − 1 − log r (http://joschu.net/blog/kl-approx.html),
    abs = |log r|. k1+, k3+ and abs+ have that value and the gradient of k2, which alone is unbiased on the policy's own
    samples. In k3 the log-ratio is clamped to ±20 and the result to 10, as in verl.
    """
    if form.endswith("+"):
        gradient_N = kl(logp_N, other_N, "k2")
        return gradient_N - gradient_N.detach() + kl(logp_N, other_N, form[:-1]).detach()
    if form == "k1":
        return logp_N - other_N
    if form == "abs":
        return (logp_N - other_N).abs()
    if form == "k2":
        return 0.5 * (logp_N - other_N) ** 2
    log_r_N = log_ratio(other_N, logp_N)
    return (torch.expm1(log_r_N) - log_r_N).clamp(max=MAX_K3)  # expm1: near 0 the 1 would eat the digits of r


def forward_kl(logp_NO: Tensor, teacher_NO: Tensor) -> Tensor:
    """[N]: Σ_o p_o (log p_o − log π_o), with the gradient of logp_NO.

    logp_NO log π, teacher_NO log p: of the teacher's K most likely tokens, and of all others as one outcome. It is
    KL(p‖π) of two distributions: never negative but for rounding, 0 where they agree, and at most that over the whole
    vocabulary. Without the last outcome, as in verl's forward_kl_topk, its least value is where π has none of it.
    """
    p_NO = teacher_NO.exp()
    return torch.where(p_NO > 0, p_NO * (teacher_NO - logp_NO), 0.0).sum(-1)


def loglinear_proximal(behaviour_N: Tensor, logp_N: Tensor, versions_N: Tensor, version: Version) -> Tensor:
    """log π_p ≈ log μ + α(sg(log π) − log μ): the policy one version back, on the line from μ to π.

    A token of version b, trained at `version` v, has α = (v − 1 − b) / (v − b): 0 for a token up to one version old,
    whose π_p is μ, and nearer to 1 the older it is. Source: A-3PO, arXiv 2512.06547, and AReaL's prox_logp_method
    'loglinear'.
    """
    age_N = (version - versions_N).clamp(min=1)
    alpha_N = 1 - 1 / age_N.to(logp_N.dtype)
    return behaviour_N + alpha_N * (logp_N.detach() - behaviour_N)


def proximal(batch: MicroBatch, now_N: Tensor, config: AlgorithmConfig, version: Version) -> Tensor:
    """log π_p [N], as `algorithm.proximal` defines it.

    now_N: log-probs of the policy as it is, without gradient; those of the version's start where the batch has no
    column `proximal`.
    """
    if config.proximal == "behaviour":
        return batch.behaviour_N
    if config.proximal == "loglinear":
        return loglinear_proximal(batch.behaviour_N, now_N, batch.versions_N, version)
    return batch.columns.get("proximal", now_N)
