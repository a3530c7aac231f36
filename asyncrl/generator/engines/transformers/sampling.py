"""Draws tokens. Each draw depends on its own counter (`counter_rng.py`), never on its neighbours in the batch.

The uniform number of a token is that of (seed, ordinal, sample, position), so a rollout drawn again (after
a lease was lost, on another machine, in another batch) gets the same numbers.

Axes:  R rows (one per sample being decoded) · V vocabulary
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from asyncrl.types import Array


class Support(NamedTuple):
    """The tokens that each row may draw, by the limits of `types.Sampling`."""

    top_p_R: Array
    top_k_R: Array
    min_p_R: Array

    @property
    def cuts(self) -> bool:
        return bool((self.top_p_R < 1).any() or (self.top_k_R > 0).any() or (self.min_p_R > 0).any())


def sample_tokens(
    logits_RV: torch.Tensor, temperature_R: Array, uniform_R: Array, support: Support | None = None
) -> tuple[Array, Array]:
    """One token per row by inverse CDF over softmax(logits / temperature) on the support, or on all tokens;
    temperature 0 takes the arg max.

    Returns (tokens [R] int64, log-probs [R] float32). A log-prob is that of the distribution drawn from; a greedy token
    gets its log-prob at temperature 1. Raises FloatingPointError if a log-prob is not finite.
    """
    logits_RV = logits_RV.float()
    greedy_R = temperature_R == 0.0
    if not np.all(temperature_R[~greedy_R] == 1.0):
        divisor_R = np.where(greedy_R, 1.0, temperature_R).astype(np.float32)
        logits_RV = logits_RV / torch.from_numpy(divisor_R).to(logits_RV.device)[:, None]
    logp_RV = logits_RV.log_softmax(-1)
    if support is not None and support.cuts:
        kept_RV = _kept(logp_RV, support) | torch.from_numpy(greedy_R).to(logp_RV.device)[:, None]
        logp_RV = torch.where(kept_RV, logp_RV, -torch.inf).log_softmax(-1)
    tokens_R = logp_RV.argmax(-1) if greedy_R.all() else _inverse_cdf(logp_RV, uniform_R)
    if greedy_R.any() and not greedy_R.all():
        tokens_R = torch.where(torch.from_numpy(greedy_R).to(tokens_R.device), logp_RV.argmax(-1), tokens_R)
    logp_R = logp_RV.gather(1, tokens_R[:, None])[:, 0].cpu().numpy()
    if not np.isfinite(logp_R).all():
        raise FloatingPointError("the logits of a decode step are not finite")
    return tokens_R.cpu().numpy(), logp_R


def _kept(logp_RV: torch.Tensor, support: Support) -> torch.Tensor:
    """bool [R, V]: the tokens that a row may draw, by min_p, then top_k, then top_p of the rest."""
    device, vocabulary = logp_RV.device, logp_RV.shape[1]
    top_p_R1, top_k_R1, min_p_R1 = (torch.from_numpy(one).to(device)[:, None] for one in support)
    sorted_RV, order_RV = logp_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocabulary, device=device)
    mass_RV = sorted_RV.double().exp()
    kept_RV = mass_RV >= min_p_R1 * mass_RV[:, :1]
    kept_RV &= rank_V < torch.where(top_k_R1 > 0, top_k_R1, vocabulary)
    mass_RV = torch.where(kept_RV, mass_RV, 0.0)
    likelier_RV = (mass_RV.cumsum(-1) - mass_RV) / mass_RV.sum(-1, keepdim=True)
    # At top_p = 1 no rounding of a sum may drop the last tokens.
    kept_RV &= (likelier_RV < top_p_R1) | (top_p_R1 >= 1)
    return torch.empty_like(kept_RV).scatter_(1, order_RV, kept_RV)


def _inverse_cdf(logp_RV: torch.Tensor, uniform_R: Array) -> torch.Tensor:
    # Summed in float64: in float32 the tail of a large vocabulary would be lost in the running sum.
    cdf_RV = logp_RV.exp().cumsum(-1, dtype=torch.float64)
    at_R1 = torch.from_numpy(uniform_R).to(cdf_RV.device)[:, None] * cdf_RV[:, -1:]
    return torch.searchsorted(cdf_RV, at_R1, right=True)[:, 0].clamp_(max=logp_RV.shape[1] - 1)
