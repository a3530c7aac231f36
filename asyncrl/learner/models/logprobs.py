"""Log-probs and entropies from hidden states, a chunk of rows at a time, so that [tokens × vocabulary] never exists.

Ranks that share the vocabulary (`VocabularyPart`) compute the logits of their own rows. They exchange a few numbers per
token, and in the backward pass the gradient of the hidden states.

Axes:  T rows (tokens to score) · C rows of one chunk · D hidden size · V vocabulary, or this rank's part of it
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from asyncrl.device.products import wide_product

CHUNK_ELEMENTS = 1 << 24
"""Logits held at once: 64 MB of float32."""


class VocabularyPart(NamedTuple):
    """This rank's rows of a vocabulary of `total` that a group shares: they begin at `start`. All ranks have `most`
    rows but for the last ones."""

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
    part: VocabularyPart | None = None,
    softcap: float | None = None,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies, under softmax(hidden · weightᵀ / temperature of the token).

    The backward pass computes the logits again, unless a single chunk held all of them.

    Args:
        chunk: rows at a time; None: as many as CHUNK_ELEMENTS allow.
        part: the rows of the vocabulary in weight_VD, if they are not all. Results and the gradient of hidden_TD are
            then equal on all ranks of the group.
        softcap: c: logits are c·tanh(x/c) (Gemma 2, arXiv:2408.00118, section 2).
        wide: whether half-precision operands have a float32 product, see `model.head_dtype`.

    Returns:
        (log-prob of each target, entropy), both [T], float32 for half-precision inputs.
    """
    rows = chunk or max(1, CHUNK_ELEMENTS // (part.most if part else weight_VD.shape[0]))
    return _TokenLogprobs.apply(hidden_TD, weight_VD, target_T, temperature_T, rows, softcap, part, wide)


def next_logprobs(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    temperature_R: Tensor,
    part: VocabularyPart | None = None,
    softcap: float | None = None,
    wide: bool = False,
) -> Tensor:
    """[R, V] log-probs of the whole vocabulary, without gradient; arguments as in `token_logprobs`."""
    logits_RV = _logits(hidden_RD, weight_VD, temperature_R, softcap, wide)
    if part is not None:
        padded_RV = torch.nn.functional.pad(logits_RV, (0, part.most - weight_VD.shape[0]))
        every = [torch.empty_like(padded_RV) for _ in range(part.group.size())]
        dist.all_gather(every, padded_RV.contiguous(), group=part.group)
        logits_RV = torch.cat(every, -1)[:, : part.total]  # padding of the last parts is at the end
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
        part: VocabularyPart | None,
        wide: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        logp_T, entropy_T, normaliser_T = (
            torch.empty(len(target_T), dtype=dtype, device=hidden_TD.device) for _ in range(3)
        )
        for at in _chunks(len(target_T), chunk):
            logits_CV = _logits(hidden_TD[at], weight_VD, temperature_T[at], softcap, wide)
            logp_T[at], entropy_T[at], normaliser_T[at] = _read(logits_CV, target_T[at], part)
        # `_read` has replaced the logits by log-probs.
        ctx.kept = logits_CV if 0 < len(target_T) <= chunk else None
        ctx.save_for_backward(hidden_TD, weight_VD, target_T, temperature_T, normaliser_T, entropy_T)
        ctx.chunk, ctx.softcap, ctx.part, ctx.wide = chunk, softcap, part, wide
        # The gradient of an unused output is then None, and its part of the backward pass is skipped.
        ctx.set_materialize_grads(False)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logp_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Any, ...]:
        hidden_TD, weight_VD, target_T, temperature_T, normaliser_T, entropy_T = ctx.saved_tensors
        part: VocabularyPart | None = ctx.part
        grad_logp_T = torch.zeros_like(normaliser_T) if grad_logp_T is None else grad_logp_T
        grad_hidden_TD = torch.zeros_like(hidden_TD)
        # Half precision would lose the small contributions of later chunks.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=normaliser_T.dtype)
        for at in _chunks(len(target_T), ctx.chunk):
            if (logp_CV := ctx.kept) is None:
                logits_CV = _logits(hidden_TD[at], weight_VD, temperature_T[at], ctx.softcap, ctx.wide)
                logp_CV = logits_CV.sub_(normaliser_T[at, None])
            grad_CV = logp_CV.exp()
            if grad_entropy_T is None:
                grad_CV *= -grad_logp_T[at, None]
            else:
                pull_CV = (logp_CV + entropy_T[at, None]).mul_(-grad_entropy_T[at, None])
                grad_CV *= pull_CV.sub_(grad_logp_T[at, None])
            place_C, here_C = _place(target_T[at], weight_VD.shape[0], part)
            grad_CV.scatter_add_(1, place_C[:, None], (grad_logp_T[at] * here_C)[:, None])
            if ctx.softcap is not None:  # d c·tanh(x/c) / dx = 1 − tanh²(x/c)
                logits_CV = (logp_CV + normaliser_T[at, None]).mul_(temperature_T[at, None])
                grad_CV *= 1 - logits_CV.div_(ctx.softcap).square_()
            grad_CV = grad_CV.div_(temperature_T[at, None]).to(hidden_TD.dtype)
            grad_hidden_TD[at] = grad_CV @ weight_VD
            grad_weight_VD += grad_CV.t() @ hidden_TD[at]
        if part is not None:
            dist.all_reduce(grad_hidden_TD, group=part.group)
        return grad_hidden_TD, grad_weight_VD.to(weight_VD.dtype), *[None] * 6


def _read(logits_CV: Tensor, target_C: Tensor, part: VocabularyPart | None) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs of the targets, entropies, log of the normaliser); `logits_CV` becomes the log-probs.

    With z the logits less their maximum, Σ e^z, Σ e^z z and the target's z are enough, and ranks can add them up.
    """
    most_C = logits_CV.amax(-1)
    if part is not None:
        dist.all_reduce(most_C, dist.ReduceOp.MAX, group=part.group)
    logits_CV -= most_C[:, None]
    place_C, here_C = _place(target_C, logits_CV.shape[1], part)
    exp_CV = logits_CV.exp()
    target_z_C = torch.where(here_C, logits_CV.gather(1, place_C[:, None])[:, 0], 0.0)
    sums_3C = torch.stack([exp_CV.sum(-1), torch.linalg.vecdot(exp_CV, logits_CV), target_z_C])
    if part is not None:
        dist.all_reduce(sums_3C, group=part.group)
    normaliser_C = sums_3C[0].log()
    logits_CV -= normaliser_C[:, None]
    return sums_3C[2] - normaliser_C, normaliser_C - sums_3C[1] / sums_3C[0], most_C + normaliser_C


def _place(target_C: Tensor, rows: int, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """(the targets' columns on this rank, 0 for those of other ranks; bool, whether they are this rank's)."""
    if part is None:
        return target_C, torch.ones_like(target_C, dtype=torch.bool)
    here_C = (target_C >= part.start) & (target_C < part.start + rows)
    return torch.where(here_C, target_C - part.start, 0), here_C


def _logits(
    hidden_CD: Tensor, weight_VD: Tensor, temperature_C: Tensor, softcap: float | None, wide: bool
) -> Tensor:
    """[C, V] over the temperature, in float32 at least; rounded to the dtype of the operands unless `wide`."""
    logits_CV = wide_product(hidden_CD, weight_VD) if wide else hidden_CD @ weight_VD.t()
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if softcap is not None:
        logits_CV = logits_CV.div_(softcap).tanh_().mul_(softcap)
    return logits_CV.div_(temperature_C[:, None])


def _chunks(rows: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk))
