"""Losses of a token's own ratio.

Axes:  N tokens
"""

from __future__ import annotations

import torch

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.losses.policy_loss import PolicyTerms, TokenLoss, none_of, ratio
from asyncrl.learner.algorithms.registry import loss


@loss("ppo", source="PPO, arXiv 1707.06347; dual clip, 1912.09729; clip-higher, DAPO, 2503.14476")
def ppo(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−min(ρA, clip(ρ, 1 − ε_lo, 1 + ε_hi)A); with `dual_clip` = c the loss of A < 0 is at most −cA.

    Clip-higher is ε_hi > ε_lo.
    """
    a_N = terms.advantages_N
    rho_N = ratio(terms.logp_N, terms.proximal_N)
    plain_N = -a_N * rho_N
    bounded_N = -a_N * rho_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    clipped_N = bounded_N > plain_N
    loss_N = torch.maximum(plain_N, bounded_N)
    if config.dual_clip is not None:
        ceiling_N = -a_N * config.dual_clip
        over_N = (a_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(over_N, ceiling_N, loss_N)
        clipped_N = clipped_N | over_N
    return TokenLoss(loss_N, clipped_N)


@loss("decoupled_ppo", source="arXiv 2110.00641; AReaL, 2505.24298")
def decoupled_ppo(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """min(w, cap) · ppo(ρ): a trust region around π_p, and w = π_p/μ for what made the tokens; cap is `weight_cap`.

    π_p must differ from π for anything to be clipped: `proximal: frozen` with several optimizer steps a version, or
    `proximal: loglinear`. `correction` has nothing to add here but its rejections. AReaL's earlier default gave
    weights above the cap 0 instead of the cap (its mode token_mask).
    """
    loss_N, clipped_N = ppo(terms, config)
    weight_N = ratio(terms.proximal_N, terms.behaviour_N).clamp(max=config.weight_cap)
    return TokenLoss(weight_N * loss_N, clipped_N)


@loss("cispo", source="MiniMax-M1, arXiv 2506.13585")
def cispo(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−sg(clip(ρ, 1 − ε_lo, 1 + ε_hi)) · A · log π: the clip bounds a token's weight and never silences it.

    The paper bounds only from above, which is ε_lo = 1.
    """
    rho_N = ratio(terms.logp_N, terms.proximal_N).detach()
    weight_N = rho_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLoss(-weight_N * terms.advantages_N * terms.logp_N, weight_N != rho_N)


@loss("sapo", source="SAPO, arXiv 2511.20347")
def sapo(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−A · 4/τ · σ(τ(ρ − 1)), with a τ for A > 0 and another for the rest: a soft gate in place of the clip.

    Its slope in ρ is 1 at ρ = 1. verl always aggregates it as 'seq-mean-token-mean'; here `aggregation` decides.
    """
    a_N = terms.advantages_N
    rho_N = ratio(terms.logp_N, terms.proximal_N)
    positive, negative = config.sapo_tau
    tau_N = torch.full_like(a_N, negative).masked_fill(a_N > 0, positive)
    gate_N = 4 / tau_N * torch.sigmoid(tau_N * (rho_N - 1))
    return TokenLoss(-a_N * gate_N, none_of(terms))


@loss("aipo", source="LlamaRL, arXiv 2505.24034")
def aipo(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−sg(min(π/μ, ρ_max)) · A · log π: importance weights against what made the token, bounded on one side only.

    ρ_max is `weight_cap`. There is no proximal policy.
    """
    r_N = ratio(terms.logp_N, terms.behaviour_N).detach()
    weight_N = r_N.clamp(max=config.weight_cap)
    return TokenLoss(-weight_N * terms.advantages_N * terms.logp_N, weight_N != r_N)


@loss("reinforce", source="REINFORCE, Williams 1992")
def reinforce(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−A · log π; `correction` makes it −w · A · log π."""
    return TokenLoss(-terms.advantages_N * terms.logp_N, none_of(terms))
