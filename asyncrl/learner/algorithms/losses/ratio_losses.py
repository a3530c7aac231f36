"""Losses of how far π has moved: by the ratio of a token, of its whole rollout, or by the divergence at the token.

Axes:  N tokens · R rollouts
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.losses.policy_loss import PolicyTerms, TokenLoss, log_ratio, none_of, ratio
from asyncrl.learner.algorithms.reductions import policy_tokens, rollout_means, rollout_sums
from asyncrl.learner.algorithms.registry import loss

MAX_LOG_SEQUENCE_RATIO = 10.0
"""verl's bound on the mean log-ratio of gspo."""

EPSILON = 1e-8
"""Added to the probability of all other tokens, as in verl."""

# --- the token's own ratio


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


@loss("none", source="verl's distillation without policy gradient")
def no_loss(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """0 · log π: the terms beside it are all that is learned from, e.g. `teacher_loss`."""
    return TokenLoss(0.0 * terms.logp_N, none_of(terms))


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

    Its slope in ρ is 1 at ρ = 1. The paper aggregates it as 'seq-mean-token-mean'; here `aggregation` decides.
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


@loss("dro", source="DRO, arXiv 2405.19107, whose value is here the advantage's baseline")
def dro(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−(A · log π − β/2 · log² ρ): a quadratic penalty in place of a trust region, β being `dro_beta`.

    Its slope −A + β log ρ has no ratio in it, so that tokens of any age have the same weight. log ρ is not clamped.
    """
    moved_N = terms.logp_N - terms.proximal_N
    return TokenLoss(config.dro_beta / 2 * moved_N**2 - terms.advantages_N * terms.logp_N, none_of(terms))


# --- the ratio of the whole rollout: every policy token of it has the same


@loss("gspo", source="GSPO, arXiv 2507.18071", needs={"rollout"})
def gspo(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−min(sA, clip(s, 1 − ε_lo, 1 + ε_hi)A) with s = exp(mean of log ρ over the rollout).

    The gradient of s goes through the token's own log π (the paper's GSPO-token: sg(s) · π / sg(π)), so that an
    advantage may differ from token to token. The paper aggregates it as 'seq-mean-token-mean'; here, as in verl
    0.9.1, `aggregation` decides.
    """
    a_N = terms.advantages_N
    mean_N = rollout_means((terms.logp_N - terms.proximal_N).detach(), terms)[terms.seq_N]
    log_s_N = mean_N + terms.logp_N - terms.logp_N.detach()
    s_N = log_s_N.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    plain_N = -a_N * s_N
    bounded_N = -a_N * s_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLoss(torch.maximum(plain_N, bounded_N), bounded_N > plain_N)


@loss("gmpo", source="GMPO, arXiv 2507.20673", needs={"rollout"})
def gmpo(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−A · exp(mean of the clipped log ρ over the rollout): the geometric mean of its tokens' clipped ratios.

    log ρ is clipped to [−ε_lo, ε_hi] where it moves on outward, as in ppo. With 'seq-mean-token-mean' this is
    the paper's objective. Off-policy weights come in as their geometric mean over the rollout, as in verl, which
    always aggregates by the mean over rollouts. Neither has our clamp of log ρ to ±20.
    """
    sign_N = terms.advantages_N.sign()
    log_rho_N = log_ratio(terms.logp_N, terms.proximal_N)
    bounded_N = log_rho_N.clamp(-config.clip_low, config.clip_high)
    held_N = sign_N * torch.minimum(sign_N * log_rho_N, sign_N * bounded_N)
    ratio_R = rollout_means(held_N, terms).exp()
    return TokenLoss(-terms.advantages_N * ratio_R[terms.seq_N], sign_N * bounded_N < sign_N * log_rho_N)


@loss("sppo", source="SPPO, arXiv 2405.00675", needs={"rollout"})
def sppo(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """(Σ log π/π_p − A)² of a rollout, π_p being the policy at the version's start and A its target, η(P̂ − ½).

    Each policy token of the rollout has an equal part of it, so that the aggregation 'seq-mean-token-sum' gives the
    mean over rollouts. The advantage 'sppo' makes the target.
    """
    moved_R = rollout_sums(terms.logp_N - terms.proximal_N, terms)
    target_R = rollout_means(terms.advantages_N, terms)
    part_R = (moved_R - target_R) ** 2 / policy_tokens(terms).clamp(min=1)
    return TokenLoss(part_R[terms.seq_N], none_of(terms))


# --- the divergence of π from μ at the token: the distribution over the vocabulary is taken for a binary one, the
# sampled token and all others. There is no proximal policy.


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
