"""Log-probs and entropies straight from hidden states, a chunk of rows at a time: never [tokens ×
vocabulary].

Ranks that share the vocabulary (`Words`) each make the logits of their own words; what goes from one to the other is a
few numbers per token, and in the backward pass the gradient of the hidden states.

Axes:  T rows (tokens to score) · C rows of one chunk · D hidden size · V vocabulary, or this rank's part of it
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

CHUNK_ELEMENTS = 1 << 24
"""Logits held at once: 64 MB of float32."""


class Words(NamedTuple):
    """The words of this rank among those of a group, which has `total`: the rows of its `weight_VD` begin at `start`;
    every rank has `most`, but for the last ones."""

    group: ProcessGroup
    start: int
    most: int
    total: int


def token_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    temperature_T: Tensor,
    chunk: int | None = None,
    words: Words | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy) under softmax(hidden · weightᵀ / temperature of the token), both [T].
    softcap c: the logits are c·tanh(x/c) (Gemma 2, arXiv:2408.00118, section 2).

    Half precision inputs give float32 results. The backward pass computes the logits again, a `chunk` of rows at a time
    (none: as many as CHUNK_ELEMENTS allow), unless one chunk was all there is: that one is kept. words: where weight_VD
    has some of the words only; the results, and the gradient of hidden_TD, are then the same on all ranks of its group.
    """
    rows = chunk or max(1, CHUNK_ELEMENTS // (words.most if words else weight_VD.shape[0]))
    return _TokenLogprobs.apply(hidden_TD, weight_VD, target_T, temperature_T, rows, softcap, words)


def next_logprobs(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    temperature_R: Tensor,
    words: Words | None = None,
    softcap: float | None = None,
) -> Tensor:
    """[R, V of all words] log-softmax, for the few places that ask for all of it; no gradient."""
    logits_RV = _logits(hidden_RD, weight_VD, temperature_R, softcap)
    if words is not None:
        padded_RV = torch.nn.functional.pad(logits_RV, (0, words.most - weight_VD.shape[0]))
        every = [torch.empty_like(padded_RV) for _ in range(words.group.size())]
        dist.all_gather(every, padded_RV.contiguous(), group=words.group)
        logits_RV = torch.cat(every, -1)[:, : words.total]  # what pads the last parts stands at the end
    return logits_RV.log_softmax(-1)


class _TokenLogprobs(torch.autograd.Function):
    """With z the logits over the temperature, p their softmax and H its entropy:

    ∂ log p_y / ∂z = onehot(y) − p          ∂H / ∂z = −p · (log p + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        target_T: Tensor,
        temperature_T: Tensor,
        chunk: int,
        softcap: float | None,
        words: Words | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        logp_T, entropy_T, normaliser_T = (
            torch.empty(len(target_T), dtype=dtype, device=hidden_TD.device) for _ in range(3)
        )
        for at in _chunks(len(target_T), chunk):
            logits_CV = _logits(hidden_TD[at], weight_VD, temperature_T[at], softcap)
            logp_T[at], entropy_T[at], normaliser_T[at] = _read(logits_CV, target_T[at], words)
        # `_read` has left the log-probs in the place of the logits.
        ctx.kept = logits_CV if 0 < len(target_T) <= chunk else None
        ctx.save_for_backward(hidden_TD, weight_VD, target_T, temperature_T, normaliser_T, entropy_T)
        ctx.chunk, ctx.softcap, ctx.words = chunk, softcap, words
        # An unused output then arrives as None, and its share of the backward pass is left out.
        ctx.set_materialize_grads(False)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logp_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Any, ...]:
        hidden_TD, weight_VD, target_T, temperature_T, normaliser_T, entropy_T = ctx.saved_tensors
        words: Words | None = ctx.words
        grad_logp_T = torch.zeros_like(normaliser_T) if grad_logp_T is None else grad_logp_T
        grad_hidden_TD = torch.zeros_like(hidden_TD)
        # Half precision would lose the small contributions of later chunks.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=normaliser_T.dtype)
        for at in _chunks(len(target_T), ctx.chunk):
            if (logp_CV := ctx.kept) is None:
                logits_CV = _logits(hidden_TD[at], weight_VD, temperature_T[at], ctx.softcap)
                logp_CV = logits_CV.sub_(normaliser_T[at, None])
            grad_CV = logp_CV.exp()
            if grad_entropy_T is None:
                grad_CV *= -grad_logp_T[at, None]
            else:
                pull_CV = (logp_CV + entropy_T[at, None]).mul_(-grad_entropy_T[at, None])
                grad_CV *= pull_CV.sub_(grad_logp_T[at, None])
            place_C, here_C = _place(target_T[at], weight_VD.shape[0], words)
            grad_CV.scatter_add_(1, place_C[:, None], (grad_logp_T[at] * here_C)[:, None])
            if ctx.softcap is not None:  # d c·tanh(x/c) / dx = 1 − tanh²(x/c)
                logits_CV = (logp_CV + normaliser_T[at, None]).mul_(temperature_T[at, None])
                grad_CV *= 1 - logits_CV.div_(ctx.softcap).square_()
            grad_CV = grad_CV.div_(temperature_T[at, None]).to(hidden_TD.dtype)
            grad_hidden_TD[at] = grad_CV @ weight_VD
            grad_weight_VD += grad_CV.t() @ hidden_TD[at]
        if words is not None:
            dist.all_reduce(grad_hidden_TD, group=words.group)
        return grad_hidden_TD, grad_weight_VD.to(weight_VD.dtype), None, None, None, None, None


def _read(logits_CV: Tensor, target_C: Tensor, words: Words | None) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs of the targets, entropies, log of the normaliser); `logits_CV` becomes the log-probs.

    z: the logits less their maximum. Σ e^z, Σ e^z z and the target's z are all it takes; ranks add up theirs.
    """
    most_C = logits_CV.amax(-1)
    if words is not None:
        dist.all_reduce(most_C, dist.ReduceOp.MAX, group=words.group)
    logits_CV -= most_C[:, None]
    place_C, here_C = _place(target_C, logits_CV.shape[1], words)
    exp_CV = logits_CV.exp()
    target_z_C = torch.where(here_C, logits_CV.gather(1, place_C[:, None])[:, 0], 0.0)
    sums_3C = torch.stack([exp_CV.sum(-1), torch.linalg.vecdot(exp_CV, logits_CV), target_z_C])
    if words is not None:
        dist.all_reduce(sums_3C, group=words.group)
    normaliser_C = sums_3C[0].log()
    logits_CV -= normaliser_C[:, None]
    return sums_3C[2] - normaliser_C, normaliser_C - sums_3C[1] / sums_3C[0], most_C + normaliser_C


def _place(target_C: Tensor, rows: int, words: Words | None) -> tuple[Tensor, Tensor]:
    """(columns of the targets among this rank's, 0 for others; bool, whether they are this rank's)."""
    if words is None:
        return target_C, torch.ones_like(target_C, dtype=torch.bool)
    here_C = (target_C >= words.start) & (target_C < words.start + rows)
    return torch.where(here_C, target_C - words.start, 0), here_C


def _logits(
    hidden_CD: Tensor, weight_VD: Tensor, temperature_C: Tensor, softcap: float | None = None
) -> Tensor:
    """[C, V], float32 at least."""
    logits_CV = hidden_CD @ weight_VD.t()
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if softcap is not None:
        logits_CV = logits_CV.div_(softcap).tanh_().mul_(softcap)
    return logits_CV.div_(temperature_C[:, None])


def _chunks(rows: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk))
