"""The rows of a decoding batch: the samples under way, one a row, as arrays, and the draws of their tokens.

Each draw depends on its own counter (`counter_rng.py`), never on its neighbours in the batch. The uniform number of a
token is that of (seed, ordinal, sample, position), so a rollout that is drawn again (after a lease was lost, on another
machine, in another batch) gets the same numbers.

Axes:  R rows, one for each sample being decoded · C columns, prompt + output tokens · V vocabulary · W numbers of
experts of a token (`types.COLUMNS`), 0 where they are not recorded
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from asyncrl.counter_rng import stream_key
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.types import COLUMNS, UNROUTED, Array, Finish, Turn, Version


@dataclass(slots=True)
class BatchedRequest:
    """A request in the batch. joined: samples that have or had a row · turns: finished ones by sample."""

    request: SampleRequest
    joined: int = 0
    turns: dict[int, Turn] = field(default_factory=dict)

    @property
    def left(self) -> int:
        return self.request.n - self.joined

    @property
    def finished(self) -> bool:
        return len(self.turns) == self.request.n

    def in_order(self) -> list[Turn]:
        """All turns; those of samples that never had a row are empty and aborted."""
        nothing = self.request.turn((), (), (), "abort")
        return [self.turns.get(sample, nothing) for sample in range(self.request.n)]


class Support(NamedTuple):
    """The tokens that each row may draw, by the limits of `types.Sampling`."""

    top_p_R: Array
    top_k_R: Array
    min_p_R: Array

    @property
    def cuts(self) -> bool:
        return bool((self.top_p_R < 1).any() or (self.top_k_R > 0).any() or (self.min_p_R > 0).any())


class Fed(NamedTuple):
    """The tokens that a decoding forward reads, row by row: the next one of each row, and drafts behind it.

    row_N, column_N: where they are · offset_N: how far behind the row's first one · drafts_A: of each row
    """

    row_N: Array
    column_N: Array
    offset_N: Array
    token_N: Array
    drafts_A: Array

    def made(self, drawn_N: Array) -> Array:
        """The tokens that each row makes, [A]: the draws up to the first that is not the draft behind it."""
        wrong_N = (self.offset_N > 0) & (self.token_N != np.roll(drawn_N, 1))
        made_A = 1 + self.drafts_A
        np.minimum.at(made_A, self.row_N[wrong_N], self.offset_N[wrong_N])
        return made_A


class BatchRows:
    """One array for each fact about a row, so that a step works on all rows at once: more attributes than other
    classes have.

    cached_R   tokens in the cache: the column of the next token to feed
    known_R    prompt and output tokens so far: the column of the next token to draw
    prompt_R   prompt tokens, with those of the answer that the request brings
    origin_R   the column of the answer's first token: from it positions count
    ahead_R    how far rotary positions of output tokens are ahead of their columns; below 0 where images stand before
    every_R    tokens between two pieces of the sample; 0: no pieces
    texts_R    whether texts end the sample
    limit_R    the number of columns at which the sample ends
    routed_R   columns whose experts are recorded. A token that runs again keeps those of its first run
    """

    def __init__(self, rows: int, columns: int, width: int = 0) -> None:
        self.used = 0
        self.used_R = np.zeros(rows, bool)
        self.cached_R, self.known_R, self.prompt_R, self.limit_R = np.zeros((4, rows), np.int64)
        self.origin_R, self.every_R, self.routed_R, self.ahead_R = np.zeros((4, rows), np.int64)
        self.texts_R = np.zeros(rows, bool)
        self.temperature_R = np.ones(rows)
        self.support = Support(np.ones(rows), np.zeros(rows, np.int64), np.zeros(rows))
        self.key_R = np.zeros(rows, np.uint64)
        self.token_RC = np.zeros((rows, columns), np.int64)
        self.logp_RC = np.zeros((rows, columns), np.float32)
        self.version_RC = np.zeros((rows, columns), np.int32)
        self.experts_RCW = np.full((rows, columns, width), UNROUTED, COLUMNS["experts"])
        self._owner: list[tuple[BatchedRequest, int] | None] = [None] * rows

    def assign(self, batched: BatchedRequest, rows: Array, cached: int, ahead: int = 0) -> None:
        """Give rows to the next samples of a request. cached: tokens of the prompt that the cache has."""
        request, sample_A = batched.request, batched.joined + np.arange(len(rows))
        prompt, sampling = len(request.prompt_ids), request.sampling
        for sample, row in zip(sample_A, rows, strict=True):
            self._owner[row] = (batched, int(sample))
        batched.joined += len(rows)
        self.used_R[rows] = True
        self.used += len(rows)
        self.cached_R[rows] = cached
        self.known_R[rows] = self.prompt_R[rows] = prompt
        self.origin_R[rows], self.routed_R[rows] = prompt - request.made, 0
        self.ahead_R[rows] = ahead
        self.every_R[rows] = 0 if request.pieces is None else request.pieces.every
        self.texts_R[rows] = request.stop is not None
        self.limit_R[rows] = min(prompt + sampling.max_tokens, self.token_RC.shape[1])
        self.temperature_R[rows] = sampling.temperature
        self.support.top_p_R[rows] = sampling.top_p
        self.support.top_k_R[rows] = sampling.top_k
        self.support.min_p_R[rows] = sampling.min_p
        self.key_R[rows] = stream_key(request.sampling.seed, request.ordinal, request.first + sample_A)
        self.token_RC[rows, :prompt] = request.prompt_ids

    def sibling(self, batched: BatchedRequest, version: Version) -> int | None:
        """A row whose keys and values of this request's prompt were made by the weights of `version`."""
        prompt = len(batched.request.prompt_ids)
        for row, owner in self.requests().items() if batched.joined else ():
            begun = owner is batched and self.cached_R[row] >= prompt
            if begun and self.version_RC[row, prompt] == version:
                return row
        return None

    def fed(self, drafts_A: Array) -> Fed:
        """The tokens to feed in the first rows, used or not. drafts_A: how many stand behind the next one of each"""
        column_A = np.where(self.used_R, self.cached_R, 0)[: len(drafts_A)]
        row_N, ends_A = np.repeat(np.arange(len(drafts_A)), 1 + drafts_A), np.cumsum(1 + drafts_A)
        offset_N = np.arange(len(row_N)) - (ends_A - 1 - drafts_A)[row_N]
        column_N = column_A[row_N] + offset_N
        return Fed(row_N, column_N, offset_N, self.token_RC[row_N, column_N], drafts_A)

    def at_stop_text(self, row_A: Array) -> Array:
        """bool [A]: the rows whose answer ends with one of its request's texts."""
        found_A = self.texts_R[row_A]
        for at in np.flatnonzero(found_A):
            row = row_A[at]
            stop = self.owner(row)[0].request.stop
            answer = self.token_RC[row, self.origin_R[row] : self.known_R[row]]
            found_A[at] = stop is not None and stop.just_found(answer)
        return found_A

    def release(self, rows: Array, finish: Sequence[Finish]) -> list[BatchedRequest]:
        """Free rows, and give their turns to their requests. Returns the requests, each once."""
        left: dict[int, BatchedRequest] = {}
        for row, reason in zip(rows, finish, strict=True):
            batched, sample = self.owner(row)
            batched.turns[sample] = self.turn(row, reason)
            left[id(batched)] = batched
            self._owner[row] = None
        self.used_R[rows] = False
        self.used -= len(rows)
        return list(left.values())

    def turn(self, row: int, finish: Finish) -> Turn:
        """A copy of this row's sample so far."""
        made = slice(self.prompt_R[row], self.known_R[row])
        request = self.owner(row)[0].request
        return request.turn(
            self.token_RC[row, made],
            self.logp_RC[row, made],
            self.version_RC[row, made],
            finish,
            self._experts(row) if self.experts_RCW.size else None,
        )

    def note_experts(self, row_N: Array, column_N: Array, experts_NW: Array) -> None:
        """Record the experts of tokens that have none yet."""
        new_N = column_N >= self.routed_R[row_N]
        self.experts_RCW[row_N[new_N], column_N[new_N]] = experts_NW[new_N]
        np.maximum.at(self.routed_R, row_N, column_N + 1)

    def copy_experts(self, source: int, rows: Array, columns: int) -> None:
        """Copy the experts of another row's first columns into these rows."""
        self.experts_RCW[rows, :columns] = self.experts_RCW[source, :columns]
        self.routed_R[rows] = columns

    def _experts(self, row: int) -> Array:
        """[P + T, W]."""
        experts = self.experts_RCW[row, : self.known_R[row]].copy()
        experts[self.routed_R[row] :] = UNROUTED
        return experts

    def move(self, source: Array, destination: Array) -> None:
        """Move rows in use to free ones."""
        for of_row in (
            self.cached_R, self.known_R, self.prompt_R, self.limit_R, self.origin_R, self.ahead_R, self.every_R,
            self.texts_R, self.routed_R, self.temperature_R, self.key_R, *self.support,
            self.token_RC, self.logp_RC, self.version_RC, self.experts_RCW,
        ):  # fmt: skip
            of_row[destination] = of_row[source]
        for free, row in zip(destination, source, strict=True):
            self._owner[free], self._owner[row] = self._owner[row], None
        self.used_R[destination], self.used_R[source] = True, False

    def requests(self) -> dict[int, BatchedRequest]:
        """The request of each row in use."""
        return {row: self.owner(row)[0] for row in np.flatnonzero(self.used_R).tolist()}

    def owner(self, row: int) -> tuple[BatchedRequest, int]:
        """The request of a row in use, and which of its samples this is."""
        owner = self._owner[row]
        assert owner is not None, "a row in use has an owner"
        return owner


# ---- draws


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
