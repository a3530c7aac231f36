"""Off-policy corrections: a weight per token, made of w = π_p / μ, that multiplies the loss.

`high` and `low` bound π_p/μ itself. A token that is weighted to 0 stays in every denominator.

Axes:  N tokens · R rollouts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from asyncrl.config.schema import CorrectionConfig
from asyncrl.learner.losses import MAX_LOG_RATIO

Rule = Callable[[Tensor, CorrectionConfig], Tensor]
"""Raw weights → the weights to use."""


def correction_weights(
    log_w_N: Tensor, loss_mask_N: Tensor, seq_N: Tensor, rollouts: int, config: CorrectionConfig
) -> Tensor:
    """[N] weights for log_w_N = log π_p − log μ (no gradient). At level 'sequence' every token of a rollout
    has the product over its policy tokens; logs are clamped to ±20 after the sum."""
    if config.level == "sequence":
        sums_R = torch.zeros(rollouts, dtype=log_w_N.dtype, device=log_w_N.device)
        log_w_N = sums_R.index_add_(0, seq_N, log_w_N * loss_mask_N)[seq_N]
    raw_N = log_w_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return RULES[config.kind](raw_N, config)


def none(raw_N: Tensor, config: CorrectionConfig) -> Tensor:
    """1 everywhere."""
    return torch.ones_like(raw_N)


def tis(raw_N: Tensor, config: CorrectionConfig) -> Tensor:
    """Truncated importance sampling: min(w, high)."""
    return raw_N.clamp(max=config.high)


def icepop(raw_N: Tensor, config: CorrectionConfig) -> Tensor:
    """w inside [low, high], 0 outside: a token (or rollout) too far off is left out."""
    return torch.where((raw_N >= config.low) & (raw_N <= config.high), raw_N, torch.zeros_like(raw_N))


RULES: Final[dict[str, Rule]] = {"none": none, "tis": tis, "icepop": icepop}
