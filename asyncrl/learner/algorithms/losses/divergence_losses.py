"""Losses that clip a token by the divergence of the policies at it, not by its ratio.

The distribution over the vocabulary is taken for a binary one: the sampled token, and all others. Ratio and divergence
are those of π against μ; there is no proximal policy.

Axes:  N tokens
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.losses.policy_loss import PolicyTerms, TokenLoss, ratio
from asyncrl.learner.algorithms.registry import loss

EPSILON = 1e-8
"""Added to the probability of all other tokens, as in verl."""


@loss("dppo_tv", source="DPPO, arXiv 2602.04879")
def dppo_tv(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−A · sg(min(π/μ, c)) · log π, and 0 for a token with |π − μ| > `dppo_bound` that moves on outward.

    Outward: A > 0 and π > μ, or A < 0 and π < μ. c is `weight_cap`. verl has a bound for each direction.
    """
    logp_N = terms.logp_N.detach()
    return _masked(terms, config, (logp_N.exp() - terms.behaviour_N.exp()).abs())


@loss("dppo_kl", source="DPPO, arXiv 2602.04879")
def dppo_kl(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−A · sg(min(π/μ, c)) · log π, and 0 for a token with KL(μ‖π) > `dppo_bound` that moves on outward.

    As dppo_tv, with μ log(μ/π) + (1 − μ) log((1 − μ)/(1 − π)) for the divergence.
    """
    log_mu_N, logp_N = terms.behaviour_N, terms.logp_N.detach()
    sampled_N = log_mu_N.exp() * (log_mu_N - logp_N)
    others_N = _others(log_mu_N) * ((_others(log_mu_N) + EPSILON) / (_others(logp_N) + EPSILON)).log()
    return _masked(terms, config, sampled_N + others_N)


def _masked(terms: PolicyTerms, config: AlgorithmConfig, divergence_N: Tensor) -> TokenLoss:
    moved_N = (terms.logp_N - terms.behaviour_N).detach()
    outward_N = moved_N * terms.advantages_N > 0
    clipped_N = outward_N & (divergence_N > config.dppo_bound)
    weight_N = ratio(terms.logp_N, terms.behaviour_N).detach().clamp(max=config.weight_cap)
    loss_N = -terms.advantages_N * weight_N * terms.logp_N
    return TokenLoss(torch.where(clipped_N, 0.0, loss_N), clipped_N)


def _others(logp_N: Tensor) -> Tensor:
    """1 − p, never below 0."""
    return -torch.expm1(logp_N.clamp(max=0.0))
