"""Policy losses per token: pure functions of log-probs and advantages.

Three policies are kept apart: behaviour μ (made the tokens), proximal π_p (what the trust region is around)
and current π. ρ = π / π_p. The off-policy weight π_p / μ is no business of a loss: `corrections.py`
multiplies it in.

A new loss is a function here under its literal, the literal in `AlgorithmConfig.loss`, and a test with
numbers.

Axes:  N tokens · R rollouts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from asyncrl.config.schema import AlgorithmConfig

MAX_LOG_RATIO = 20.0
"""exp of more than this is no information, only an overflow further on."""


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """What a loss is made of: logp_N of π with its gradient, proximal_N of π_p without, advantages_N,
    loss_mask_N bool, and seq_N with `rollouts` = R for the losses that work on whole sequences."""

    logp_N: Tensor
    proximal_N: Tensor
    advantages_N: Tensor
    loss_mask_N: Tensor
    seq_N: Tensor
    rollouts: int


class TokenLoss(NamedTuple):
    """loss_N with its gradient, and clipped_N bool: tokens whose gradient the loss has cut off."""

    loss_N: Tensor
    clipped_N: Tensor


Loss = Callable[[PolicyTerms, AlgorithmConfig], TokenLoss]


def ratio(logp_N: Tensor, other_N: Tensor) -> Tensor:
    """exp(logp − other), the log clamped to ±20."""
    return (logp_N - other_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ppo(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−min(ρA, clip(ρ, 1 − ε_lo, 1 + ε_hi)A); with `dual_clip` = c the loss of A < 0 is at most −cA.

    Sources: PPO, arXiv 1707.06347; dual clip, 1912.09729; clip-higher (ε_hi > ε_lo), DAPO, 2503.14476.
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
    return TokenLoss(loss_N, clipped_N.detach())


def reinforce(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−A · log π."""
    return TokenLoss(-terms.advantages_N * terms.logp_N, torch.zeros_like(terms.loss_mask_N))


LOSSES: Final[dict[str, Loss]] = {"ppo": ppo, "reinforce": reinforce}
