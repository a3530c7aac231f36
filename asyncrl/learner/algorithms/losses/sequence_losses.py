"""Losses of whole rollouts: every policy token of a rollout has the ratio of all of them.

Axes:  N tokens · R rollouts
"""

from __future__ import annotations

import torch

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.losses.policy_loss import (
    PolicyTerms,
    TokenLoss,
    log_ratio,
    none_of,
)
from asyncrl.learner.algorithms.registry import loss
from asyncrl.learner.algorithms.segments import policy_tokens, rollout_means, rollout_sums

MAX_LOG_SEQUENCE_RATIO = 10.0
"""verl's bound on the mean log-ratio of gspo."""


@loss("gspo", source="GSPO, arXiv 2507.18071")
def gspo(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−min(sA, clip(s, 1 − ε_lo, 1 + ε_hi)A) with s = exp(mean of log ρ over the rollout).

    The gradient of s goes through the token's own log π (the paper's GSPO-token: sg(s) · π / sg(π)), so that an
    advantage may differ from token to token. verl always aggregates it as 'seq-mean-token-mean'; here `aggregation`
    decides.
    """
    a_N = terms.advantages_N
    mean_N = rollout_means((terms.logp_N - terms.proximal_N).detach(), terms)[terms.seq_N]
    log_s_N = mean_N + terms.logp_N - terms.logp_N.detach()
    s_N = log_s_N.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    plain_N = -a_N * s_N
    bounded_N = -a_N * s_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLoss(torch.maximum(plain_N, bounded_N), bounded_N > plain_N)


@loss("gmpo", source="GMPO, arXiv 2507.20673")
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


@loss("sppo", source="SPPO, arXiv 2405.00675")
def sppo(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """(Σ log π/π_p − A)² of a rollout, π_p being the policy at the version's start and A its target, η(P̂ − ½).

    Each policy token of the rollout has an equal part of it, so that the aggregation 'seq-mean-token-sum' gives the
    mean over rollouts. The advantage 'sppo' makes the target.
    """
    moved_R = rollout_sums(terms.logp_N - terms.proximal_N, terms)
    target_R = rollout_means(terms.advantages_N, terms)
    part_R = (moved_R - target_R) ** 2 / policy_tokens(terms).clamp(min=1)
    return TokenLoss(part_R[terms.seq_N], none_of(terms))
