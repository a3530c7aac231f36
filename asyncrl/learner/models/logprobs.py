"""Log-probs and entropies from hidden states, a chunk of rows at a time, so that [tokens × vocabulary] never exists.

Ranks that share the vocabulary (`VocabularyPart`) compute the logits of their own rows. They exchange a few numbers per
token, and in the backward pass the gradient of the hidden states.

Axes:  T rows (tokens to score) · C rows of one chunk · D hidden size · V vocabulary, or this rank's part of it ·
M targets of a row · K most likely tokens of a row
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from asyncrl.device.products import wide_product

CHUNK_ELEMENTS = 1 << 24
"""Logits held at once: 64 MB of float32."""


@dataclass(frozen=True, slots=True)
class LikelyTokens:
    """K further tokens at each position, whose log-probs a language model gives beside that of the token itself.

    among: of a teacher, which gives its K most likely ones of the tokens below this number: those that the policy has.
    0: they are those of the column `likeliest`.
    """

    count: int
    among: int = 0

    @property
    def chosen(self) -> bool:
        """Whether this model chooses them."""
        return self.among > 0

    @property
    def width(self) -> tuple[int, ...]:
        """The shape of the first output at one token, see `networks.token_outputs`."""
        return (1 + 2 * self.count,) if self.chosen else ()


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
    target_TM: Tensor,
    temperature_T: Tensor,
    chunk: int | None = None,
    part: VocabularyPart | None = None,
    softcap: float | None = None,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies, under softmax(hidden · weightᵀ / temperature of the token).

    The backward pass computes the logits again, unless a single chunk held all of them.

    Args:
        target_TM: any number of tokens for each row; [T]: one.
        chunk: rows at a time; None: as many as CHUNK_ELEMENTS allow.
        part: the rows of the vocabulary in weight_VD, if they are not all. Results and the gradient of hidden_TD are
            then equal on all ranks of the group.
        softcap: c: logits are c·tanh(x/c) (Gemma 2, arXiv:2408.00118, section 2).
        wide: whether half-precision operands have a float32 product, see `model.head_dtype`.

    Returns:
        (log-prob of each target as target_TM, entropy [T]), float32 for half-precision inputs.
    """
    rows = chunk or _rows(weight_VD, part)
    columns_TM = target_TM if target_TM.ndim == 2 else target_TM[:, None]
    logp_TM, entropy_T = _TokenLogprobs.apply(
        hidden_TD, weight_VD, columns_TM, temperature_T, rows, softcap, part, wide
    )
    return logp_TM if target_TM.ndim == 2 else logp_TM[:, 0], entropy_T


@torch.no_grad()
def most_likely(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    temperature_T: Tensor,
    likely: LikelyTokens,
    part: VocabularyPart | None = None,
    softcap: float | None = None,
    wide: bool = False,
) -> Tensor:
    """[T, K] int64: the most likely tokens of each row, the likeliest first, without gradient; other arguments as in
    `token_logprobs`."""
    token_TK = torch.empty((len(hidden_TD), likely.count), dtype=torch.int64, device=hidden_TD.device)
    for at in _chunks(len(hidden_TD), _rows(weight_VD, part)):
        logits_CV = _logits(hidden_TD[at], weight_VD, temperature_T[at], softcap, wide)
        token_TK[at] = _best(logits_CV, likely, part)
    return token_TK


def _best(logits_CV: Tensor, likely: LikelyTokens, part: VocabularyPart | None) -> Tensor:
    """[C, K]. Ranks that share the vocabulary exchange the best of their own rows."""
    if part is None:
        return logits_CV[:, : likely.among].topk(likely.count).indices
    mine_CV = logits_CV[:, : max(0, likely.among - part.start)]
    here = min(likely.count, mine_CV.shape[1])
    best_CK, column_CK = mine_CV.topk(here)
    best_CK = torch.nn.functional.pad(best_CK, (0, likely.count - here), value=-torch.inf)
    token_CK = torch.nn.functional.pad(column_CK + part.start, (0, likely.count - here))
    every_best, every_token = (
        [torch.empty_like(mine) for _ in range(part.group.size())] for mine in (best_CK, token_CK)
    )
    dist.all_gather(every_best, best_CK.contiguous(), group=part.group)
    dist.all_gather(every_token, token_CK.contiguous(), group=part.group)
    place_CK = torch.cat(every_best, -1).topk(likely.count).indices
    return torch.cat(every_token, -1).gather(1, place_CK)


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

    for each of the targets y of a row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        target_TM: Tensor,
        temperature_T: Tensor,
        chunk: int,
        softcap: float | None,
        part: VocabularyPart | None,
        wide: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        logp_TM = torch.empty(target_TM.shape, dtype=dtype, device=hidden_TD.device)
        entropy_T, normaliser_T = (logp_TM.new_empty(len(target_TM)) for _ in range(2))
        for at in _chunks(len(target_TM), chunk):
            logits_CV = _logits(hidden_TD[at], weight_VD, temperature_T[at], softcap, wide)
            logp_TM[at], entropy_T[at], normaliser_T[at] = _read(logits_CV, target_TM[at], part)
        # `_read` has replaced the logits by log-probs.
        ctx.kept = logits_CV if 0 < len(target_TM) <= chunk else None
        ctx.save_for_backward(hidden_TD, weight_VD, target_TM, temperature_T, normaliser_T, entropy_T)
        ctx.chunk, ctx.softcap, ctx.part, ctx.wide = chunk, softcap, part, wide
        # The gradient of an unused output is then None, and its part of the backward pass is skipped.
        ctx.set_materialize_grads(False)
        return logp_TM, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logp_TM: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Any, ...]:
        hidden_TD, weight_VD, target_TM, temperature_T, normaliser_T, entropy_T = ctx.saved_tensors
        part: VocabularyPart | None = ctx.part
        if grad_logp_TM is None:
            grad_logp_TM = normaliser_T.new_zeros(target_TM.shape)
        grad_logp_T = grad_logp_TM.sum(-1)
        grad_hidden_TD = torch.zeros_like(hidden_TD)
        # Half precision would lose the small contributions of later chunks.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=normaliser_T.dtype)
        for at in _chunks(len(target_TM), ctx.chunk):
            if (logp_CV := ctx.kept) is None:
                logits_CV = _logits(hidden_TD[at], weight_VD, temperature_T[at], ctx.softcap, ctx.wide)
                logp_CV = logits_CV.sub_(normaliser_T[at, None])
            grad_CV = logp_CV.exp()
            if grad_entropy_T is None:
                grad_CV *= -grad_logp_T[at, None]
            else:
                pull_CV = (logp_CV + entropy_T[at, None]).mul_(-grad_entropy_T[at, None])
                grad_CV *= pull_CV.sub_(grad_logp_T[at, None])
            place_CM, here_CM = _place(target_TM[at], weight_VD.shape[0], part)
            grad_CV.scatter_add_(1, place_CM, grad_logp_TM[at] * here_CM)
            if ctx.softcap is not None:  # d c·tanh(x/c) / dx = 1 − tanh²(x/c)
                logits_CV = (logp_CV + normaliser_T[at, None]).mul_(temperature_T[at, None])
                grad_CV *= 1 - logits_CV.div_(ctx.softcap).square_()
            grad_CV = grad_CV.div_(temperature_T[at, None]).to(hidden_TD.dtype)
            grad_hidden_TD[at] = grad_CV @ weight_VD
            grad_weight_VD += grad_CV.t() @ hidden_TD[at]
        if part is not None:
            dist.all_reduce(grad_hidden_TD, group=part.group)
        return grad_hidden_TD, grad_weight_VD.to(weight_VD.dtype), *[None] * 6


def _read(logits_CV: Tensor, target_CM: Tensor, part: VocabularyPart | None) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs of the targets, entropies, log of the normaliser); `logits_CV` becomes the log-probs.

    With z the logits less their maximum, Σ e^z, Σ e^z z and the target's z are enough, and ranks can add them up.
    """
    most_C = logits_CV.amax(-1)
    if part is not None:
        dist.all_reduce(most_C, dist.ReduceOp.MAX, group=part.group)
    logits_CV -= most_C[:, None]
    place_CM, here_CM = _place(target_CM, logits_CV.shape[1], part)
    exp_CV = logits_CV.exp()
    target_z_CM = torch.where(here_CM, logits_CV.gather(1, place_CM), 0.0)
    sums_C2 = torch.stack([exp_CV.sum(-1), torch.linalg.vecdot(exp_CV, logits_CV)], -1)
    if part is not None:
        every = torch.cat([sums_C2, target_z_CM], -1)
        dist.all_reduce(every, group=part.group)
        sums_C2, target_z_CM = every[:, :2], every[:, 2:]
    exp_sum_C, product_C = sums_C2.unbind(-1)
    normaliser_C = exp_sum_C.log()
    logits_CV -= normaliser_C[:, None]
    return (
        target_z_CM - normaliser_C[:, None],
        normaliser_C - product_C / exp_sum_C,
        most_C + normaliser_C,
    )


def _place(target_CM: Tensor, rows: int, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """(the targets' columns on this rank, 0 for those of other ranks; bool, whether they are this rank's)."""
    if part is None:
        return target_CM, torch.ones_like(target_CM, dtype=torch.bool)
    here_CM = (target_CM >= part.start) & (target_CM < part.start + rows)
    return torch.where(here_CM, target_CM - part.start, 0), here_CM


def _logits(
    hidden_CD: Tensor, weight_VD: Tensor, temperature_C: Tensor, softcap: float | None, wide: bool
) -> Tensor:
    """[C, V] over the temperature, in float32 at least; rounded to the dtype of the operands unless `wide`."""
    logits_CV = wide_product(hidden_CD, weight_VD) if wide else hidden_CD @ weight_VD.t()
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if softcap is not None:
        logits_CV = logits_CV.div_(softcap).tanh_().mul_(softcap)
    return logits_CV.div_(temperature_C[:, None])


def _rows(weight_VD: Tensor, part: VocabularyPart | None) -> int:
    """The rows of a chunk, equal on all ranks."""
    return max(1, CHUNK_ELEMENTS // (part.most if part else weight_VD.shape[0]))


def _chunks(rows: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk))
