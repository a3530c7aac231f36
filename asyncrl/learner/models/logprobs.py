"""Log-probs and entropies from hidden states, a chunk of rows at a time, so that [tokens × vocabulary] never exists.

Ranks that share the vocabulary (`VocabularyPart`) compute the logits of their own rows. They exchange a few numbers per
token, and in the backward pass the gradient of the hidden states.

Axes:  T rows (tokens to score) · C rows of one chunk · D hidden size · V vocabulary, or this rank's part of it ·
K likely tokens of a row · O = K + 1 outcomes: each of these tokens, and all others together
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
        """The shape of the first output at one token."""
        return (2 + 2 * self.count,) if self.chosen else ()


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
    likely_TK: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Log-probs of the targets and entropies, under softmax(hidden · weightᵀ / temperature of the token).

    The backward pass computes the logits again, unless a single chunk held all of them.

    Args:
        chunk: rows at a time; None: as many as CHUNK_ELEMENTS allow.
        part: the rows of the vocabulary in weight_VD, if they are not all. Results and the gradient of hidden_TD are
            then equal on all ranks of the group.
        softcap: c: logits are c·tanh(x/c) (Gemma 2, arXiv:2408.00118, section 2).
        wide: whether half-precision operands have a float32 product, see `model.head_dtype`.
        likely_TK: tokens whose outcomes are wanted too, different ones in a row.

    Returns:
        (log-prob of each target, entropy), both [T], float32 for half-precision inputs; with likely_TK also the
        log-probs [T, O] of the outcomes.
    """
    rows = chunk or _rows(weight_VD, part)
    arguments = (target_T, likely_TK, temperature_T, rows, softcap, part, wide)
    logp_T, entropy_T, outcome_TO = _TokenLogprobs.apply(hidden_TD, weight_VD, *arguments)
    return (logp_T, entropy_T) if likely_TK is None else (logp_T, entropy_T, outcome_TO)


@torch.no_grad()
def most_likely(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    temperature_T: Tensor,
    likely: LikelyTokens,
    part: VocabularyPart | None = None,
    softcap: float | None = None,
    wide: bool = False,
) -> Tensor:
    """[T, 2 + 2K] without gradient: the target's log-prob, those of the outcomes, and the K most likely tokens as
    numbers, the likeliest first. Float32 has all whole numbers up to 2^24, more than any vocabulary. Other arguments as
    in `token_logprobs`."""
    dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
    found_TW = torch.empty((len(hidden_TD), *likely.width), dtype=dtype, device=hidden_TD.device)
    for at in _chunks(len(hidden_TD), _rows(weight_VD, part)):
        logits_CV = _logits(hidden_TD[at], weight_VD, temperature_T[at], softcap, wide)
        token_CK = _best(logits_CV, likely, part)
        read = _read(logits_CV, target_T[at], token_CK, part)
        found_TW[at] = torch.cat([read.logp_C[:, None], read.outcome_CO, token_CK.to(dtype)], -1)
    return found_TW


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
    """With z the logits over the temperature, p their softmax, H its entropy and s the sum of p over all tokens but K:

    ∂ log p_y / ∂z = onehot(y) − p          ∂H / ∂z = −p · (log p + H)
    ∂ log s / ∂z = p / s − p, with p / s for those tokens alone
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        target_T: Tensor,
        likely_TK: Tensor | None,
        temperature_T: Tensor,
        chunk: int,
        softcap: float | None,
        part: VocabularyPart | None,
        wide: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        logp_T, entropy_T, normaliser_T = (
            torch.empty(len(target_T), dtype=dtype, device=hidden_TD.device) for _ in range(3)
        )
        outcome_TO = None if likely_TK is None else logp_T.new_empty(len(target_T), likely_TK.shape[1] + 1)
        for at in _chunks(len(target_T), chunk):
            logits_CV = _logits(hidden_TD[at], weight_VD, temperature_T[at], softcap, wide)
            read = _read(logits_CV, target_T[at], None if likely_TK is None else likely_TK[at], part)
            logp_T[at], entropy_T[at], normaliser_T[at] = read.logp_C, read.entropy_C, read.normaliser_C
            if outcome_TO is not None:
                outcome_TO[at] = read.outcome_CO
        # `_read` has replaced the logits by log-probs.
        ctx.kept = logits_CV if 0 < len(target_T) <= chunk else None
        others_T = None if outcome_TO is None else outcome_TO[:, -1].clone()
        ctx.save_for_backward(
            *(hidden_TD, weight_VD, target_T, likely_TK, temperature_T, normaliser_T, entropy_T, others_T)
        )
        ctx.chunk, ctx.softcap, ctx.part, ctx.wide = chunk, softcap, part, wide
        # The gradient of an unused output is then None, and its part of the backward pass is skipped.
        ctx.set_materialize_grads(False)
        return logp_T, entropy_T, outcome_TO

    @staticmethod
    def backward(
        ctx: Any, grad_logp_T: Tensor | None, grad_entropy_T: Tensor | None, grad_outcome_TO: Tensor | None
    ) -> tuple[Any, ...]:
        hidden_TD, weight_VD, target_T, likely_TK, temperature_T, *kept = ctx.saved_tensors
        normaliser_T, entropy_T, others_T = kept
        part: VocabularyPart | None = ctx.part
        grad_logp_T = torch.zeros_like(normaliser_T) if grad_logp_T is None else grad_logp_T
        pull_T = grad_logp_T if grad_outcome_TO is None else grad_logp_T + grad_outcome_TO.sum(-1)
        grad_hidden_TD = torch.zeros_like(hidden_TD)
        # Half precision would lose the small contributions of later chunks.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=normaliser_T.dtype)
        for at in _chunks(len(target_T), ctx.chunk):
            if (logp_CV := ctx.kept) is None:
                logits_CV = _logits(hidden_TD[at], weight_VD, temperature_T[at], ctx.softcap, ctx.wide)
                logp_CV = logits_CV.sub_(normaliser_T[at, None])
            grad_CV = logp_CV.exp()
            if grad_entropy_T is None:
                grad_CV *= -pull_T[at, None]
            else:
                pull_CV = (logp_CV + entropy_T[at, None]).mul_(-grad_entropy_T[at, None])
                grad_CV *= pull_CV.sub_(pull_T[at, None])
            place_C, here_C = _place(target_T[at], weight_VD.shape[0], part)
            grad_CV.scatter_add_(1, place_C[:, None], (grad_logp_T[at] * here_C)[:, None])
            if grad_outcome_TO is not None:
                _add_outcomes(grad_CV, logp_CV, grad_outcome_TO[at], likely_TK[at], others_T[at], part)
            if ctx.softcap is not None:  # d c·tanh(x/c) / dx = 1 − tanh²(x/c)
                logits_CV = (logp_CV + normaliser_T[at, None]).mul_(temperature_T[at, None])
                grad_CV *= 1 - logits_CV.div_(ctx.softcap).square_()
            grad_CV = grad_CV.div_(temperature_T[at, None]).to(hidden_TD.dtype)
            grad_hidden_TD[at] = grad_CV @ weight_VD
            grad_weight_VD += grad_CV.t() @ hidden_TD[at]
        if part is not None:
            dist.all_reduce(grad_hidden_TD, group=part.group)
        return grad_hidden_TD, grad_weight_VD.to(weight_VD.dtype), *[None] * 7


def _add_outcomes(
    grad_CV: Tensor,
    logp_CV: Tensor,
    grad_CO: Tensor,
    likely_CK: Tensor,
    others_C: Tensor,
    part: VocabularyPart | None,
) -> None:
    """Add the outcomes' gradient, but for its part −p. others_C: log s."""
    place_CK, here_CK = _place(likely_CK, grad_CV.shape[1], part)
    grad_CV.scatter_add_(1, place_CK, grad_CO[:, :-1] * here_CK)
    share_CV = _without((logp_CV - others_C[:, None]).exp_(), place_CK, here_CK)
    grad_CV += share_CV.mul_(grad_CO[:, -1:])


class _Read(NamedTuple):
    """Log-probs of the targets, entropies, logs of the normaliser, log-probs of the outcomes."""

    logp_C: Tensor
    entropy_C: Tensor
    normaliser_C: Tensor
    outcome_CO: Tensor


def _read(
    logits_CV: Tensor, target_C: Tensor, likely_CK: Tensor | None, part: VocabularyPart | None
) -> _Read:
    """`logits_CV` becomes the log-probs.

    With z the logits less their maximum, Σ e^z, Σ e^z z and the z of some tokens are enough, and ranks can add them up.
    """
    most_C = logits_CV.amax(-1)
    if part is not None:
        dist.all_reduce(most_C, dist.ReduceOp.MAX, group=part.group)
    logits_CV -= most_C[:, None]
    exp_CV = logits_CV.exp()
    sums = [exp_CV.sum(-1), torch.linalg.vecdot(exp_CV, logits_CV), _found(logits_CV, target_C, part)]
    if likely_CK is not None:
        sums.append(_without(exp_CV, *_place(likely_CK, logits_CV.shape[1], part)).sum(-1))
        sums += _found(logits_CV, likely_CK, part).unbind(-1)
    sums_SC = torch.stack(sums)
    if part is not None:
        dist.all_reduce(sums_SC, group=part.group)
    normaliser_C = sums_SC[0].log()
    logits_CV -= normaliser_C[:, None]
    outcome_OC = sums_SC[4:]
    if likely_CK is not None:
        least = torch.finfo(sums_SC.dtype).tiny
        outcome_OC = torch.cat([sums_SC[4:], sums_SC[3:4].clamp(min=least).log()]) - normaliser_C
    return _Read(
        sums_SC[2] - normaliser_C,
        normaliser_C - sums_SC[1] / sums_SC[0],
        most_C + normaliser_C,
        outcome_OC.t(),
    )


def _found(logits_CV: Tensor, token: Tensor, part: VocabularyPart | None) -> Tensor:
    """The logits of tokens, [C] or [C, K]; 0 for those of other ranks."""
    place, here = _place(token, logits_CV.shape[1], part)
    return torch.where(here, logits_CV.gather(1, place.view(len(place), -1)).view_as(place), 0.0)


def _without(values_CV: Tensor, place_CK: Tensor, here_CK: Tensor) -> Tensor:
    """Values of 0 or more, which become 0 at these tokens of this rank; several of other ranks share a place."""
    least_CK = torch.where(here_CK, 0.0, torch.inf).to(values_CV.dtype)
    return values_CV.scatter_reduce_(1, place_CK, least_CK, "amin")


def _place(target: Tensor, rows: int, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """(the targets' columns on this rank, 0 for those of other ranks; bool, whether they are this rank's)."""
    if part is None:
        return target, torch.ones_like(target, dtype=torch.bool)
    here = (target >= part.start) & (target < part.start + rows)
    return torch.where(here, target - part.start, 0), here


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
