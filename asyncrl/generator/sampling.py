"""Drawing tokens: which one is made depends on its own counter (`draws.py`), never on its neighbours in the batch.

The uniform number of a token is that of (seed, ordinal, sample, position), so a rollout drawn again (after
a lease was lost, on another machine, in another batch) gets the same numbers.

Axes:  R rows (one per sample being decoded) · V vocabulary
"""

from __future__ import annotations

import numpy as np
import torch

from asyncrl.types import Array


def draw(logits_RV: torch.Tensor, temperature_R: Array, uniform_R: Array) -> tuple[Array, Array]:
    """One token per row by inverse CDF over softmax(logits / temperature); temperature 0 takes the arg max.

    Returns (tokens [R] int64, log-probs [R] float32). A log-prob is that of the distribution drawn from; a
    greedy token gets its log-prob at temperature 1. Raises FloatingPointError if one is not finite.
    """
    logits_RV = logits_RV.float()
    greedy_R = temperature_R == 0.0
    if not np.all(temperature_R[~greedy_R] == 1.0):
        divisor_R = np.where(greedy_R, 1.0, temperature_R).astype(np.float32)
        logits_RV = logits_RV / torch.from_numpy(divisor_R).to(logits_RV.device)[:, None]
    logp_RV = logits_RV.log_softmax(-1)
    tokens_R = logp_RV.argmax(-1) if greedy_R.all() else _inverse_cdf(logp_RV, uniform_R)
    if greedy_R.any() and not greedy_R.all():
        tokens_R = torch.where(torch.from_numpy(greedy_R).to(tokens_R.device), logp_RV.argmax(-1), tokens_R)
    logp_R = logp_RV.gather(1, tokens_R[:, None])[:, 0].cpu().numpy()
    if not np.isfinite(logp_R).all():
        raise FloatingPointError("the logits of a decode step are not finite")
    return tokens_R.cpu().numpy(), logp_R


def _inverse_cdf(logp_RV: torch.Tensor, uniform_R: Array) -> torch.Tensor:
    # Summed in float64: in float32 the tail of a large vocabulary would be lost in the running sum.
    cdf_RV = logp_RV.exp().cumsum(-1, dtype=torch.float64)
    at_R1 = torch.from_numpy(uniform_R).to(cdf_RV.device)[:, None] * cdf_RV[:, -1:]
    return torch.searchsorted(cdf_RV, at_R1, right=True)[:, 0].clamp_(max=logp_RV.shape[1] - 1)
