"""The loss of a critic.

Axes:  N tokens
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.learner.algorithms.losses.policy_loss import TokenLoss


def value_loss(values_N: Tensor, old_N: Tensor, returns_N: Tensor, clip: float | None) -> TokenLoss:
    """½ · max((V − G)², (clip(V, V_old ± ε) − G)²) per token; without ε, ½ (V − G)².

    values_N V with its gradient, old_N V_old at the version's start, returns_N G. To be aggregated as 'token-mean' over
    the global batch. clipped_N: where the clipped square is the larger one, and there is no gradient. Source: PPO2 of
    OpenAI baselines, the value function of arXiv 1707.06347.
    """
    plain_N = (values_N - returns_N) ** 2
    if clip is None:
        return TokenLoss(0.5 * plain_N, torch.zeros_like(plain_N, dtype=torch.bool))
    held_N = torch.clamp(values_N, old_N - clip, old_N + clip)
    bounded_N = (held_N - returns_N) ** 2
    return TokenLoss(0.5 * torch.maximum(plain_N, bounded_N), bounded_N > plain_N)
