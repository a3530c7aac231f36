"""Log-probs and entropies straight from hidden states, a chunk of rows at a time: never [tokens ×
vocabulary].

Axes:  T rows (tokens to score) · C rows of one chunk · D hidden size · V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Logits held at once: 64 MB of float32."""


def token_logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, temperature_T: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy) under softmax(hidden · weightᵀ / temperature of the token), both [T].

    Half precision inputs give float32 results. The backward pass computes the logits again, a `chunk` of rows
    at a time (none: as many as CHUNK_ELEMENTS allow).
    """
    rows = chunk or max(1, CHUNK_ELEMENTS // weight_VD.shape[0])
    return _TokenLogprobs.apply(hidden_TD, weight_VD, target_T, temperature_T, rows)


class _TokenLogprobs(torch.autograd.Function):
    """With z the logits over the temperature, p their softmax and H its entropy:

    ∂ log p_y / ∂z = onehot(y) − p          ∂H / ∂z = −p · (log p + H)
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, temperature_T: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        logp_T, entropy_T, normaliser_T = (
            torch.empty(len(target_T), dtype=dtype, device=hidden_TD.device) for _ in range(3)
        )
        for at in _chunks(len(target_T), chunk):
            logits_CV = _logits(hidden_TD[at], weight_VD, temperature_T[at])
            normaliser_T[at] = torch.logsumexp(logits_CV, -1)
            logits_CV -= normaliser_T[at, None]
            logp_T[at] = logits_CV.gather(1, target_T[at, None])[:, 0]
            entropy_T[at] = -(logits_CV.exp() * logits_CV).sum(-1)
        ctx.save_for_backward(hidden_TD, weight_VD, target_T, temperature_T, normaliser_T, entropy_T)
        ctx.chunk = chunk
        # An unused output then arrives as None, and its share of the backward pass is left out.
        ctx.set_materialize_grads(False)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logp_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Any, ...]:
        hidden_TD, weight_VD, target_T, temperature_T, normaliser_T, entropy_T = ctx.saved_tensors
        grad_hidden_TD = torch.zeros_like(hidden_TD)
        # Half precision would lose the small contributions of later chunks.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=normaliser_T.dtype)
        for at in _chunks(len(target_T), ctx.chunk):
            logp_CV = _logits(hidden_TD[at], weight_VD, temperature_T[at]) - normaliser_T[at, None]
            p_CV = logp_CV.exp()
            grad_CV = torch.zeros_like(p_CV)
            if grad_logp_T is not None:
                grad_CV -= p_CV * grad_logp_T[at, None]
                grad_CV.scatter_add_(1, target_T[at, None], grad_logp_T[at, None])
            if grad_entropy_T is not None:
                grad_CV -= p_CV * (logp_CV + entropy_T[at, None]) * grad_entropy_T[at, None]
            grad_CV = grad_CV.div_(temperature_T[at, None]).to(hidden_TD.dtype)
            grad_hidden_TD[at] = grad_CV @ weight_VD
            grad_weight_VD += grad_CV.t() @ hidden_TD[at]
        return grad_hidden_TD, grad_weight_VD.to(weight_VD.dtype), None, None, None


def _logits(hidden_CD: Tensor, weight_VD: Tensor, temperature_C: Tensor) -> Tensor:
    logits_CV = hidden_CD @ weight_VD.t()
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)).div_(temperature_C[:, None])


def _chunks(rows: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk))
