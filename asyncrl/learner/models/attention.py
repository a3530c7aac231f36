"""Causal attention within each document of a packed sequence, for any Hugging Face model that takes its attention from
the registry: load it with `attn_implementation=PACKED` and call it with `documents=Documents(lengths)`.

Hugging Face passes unknown keyword arguments of a model's forward to the attention function, so documents need no
global. They also carry the context parallelism of a micro-batch (`context.py`).

Axes:  N packed tokens · n of them, of this rank's slice · D documents of one bucket · L longest of them · H query
heads · K key heads · E head size
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.device import accelerator
from asyncrl.device.copies import on_device
from asyncrl.errors import ConfigError
from asyncrl.learner.parallel.context import ContextParallel
from asyncrl.models.attention import PLAIN, AttentionRule, dense_attention, flash, flash_attn_varlen_func
from asyncrl.models.vision import MediaInputs

log = logging.getLogger(__name__)

PACKED = "asyncrl_packed"

CHANGES_SCORES = {"position_bias", "head_mask"}
"""Options of an attention call that are refused: ALiBi, pruned heads."""

GROWTH, SLACK = 1.35, 8
"""Documents share a bucket while the longest is within GROWTH times, or SLACK tokens of, the shortest: that gives few
large attention calls with little padding."""


class LengthBucket(NamedTuple):
    """Documents of similar length.

    index_DL: the place of each token in the packed sequence, clamped past a document's end · keep_DL: which are real
    """

    index_DL: Tensor
    keep_DL: Tensor


class Documents:
    """Boundaries of packed documents, in the forms that attention kernels take. Each is computed on first use, on the
    CPU, and copied to the device: there a shape that depends on values would make this thread wait."""

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | None = None,
        context: ContextParallel | None = None,
        multiple: int = 1,
        mask_N: Tensor | None = None,
        media: MediaInputs | None = None,
    ) -> None:
        """context: the ranks that share the tokens; None: this rank has all of them. multiple: a last document of
        padding makes each rank's tokens a multiple of it. mask_N: the loss mask, on the CPU; for heads alone.
        media: what the tokens show."""
        padding = -sum(lengths) % (multiple * (context.multiple if context else 1))
        self.lengths = (*lengths, padding) if padding else tuple(lengths)
        self._padded = padding > 0
        self.device, self.context, self._mask_N = device, context, mask_N
        self.media = media

    @cached_property
    def boundaries(self) -> Tensor:
        """[documents + 1] int32: 0, then where each document ends."""
        ends = torch.tensor(self.lengths).cumsum(0)
        return on_device(F.pad(ends, (1, 0)).int(), self.device)

    @cached_property
    def spans(self) -> list[slice]:
        """The packed tokens that this rank computes, as slices of equal length."""
        tokens = sum(self.lengths)
        return self.context.spans(tokens) if self.context else [slice(0, tokens)]

    def mine(self, values_N: Tensor) -> Tensor:
        """[n, …]: this rank's part of values [N, …] that every rank has, 0 for padding."""
        others = (0, 0) * (values_N.dim() - 1)
        padded_N = F.pad(values_N, (*others, 0, sum(self.lengths) - len(values_N)))
        return torch.cat([padded_N[span] for span in self.spans])

    @cached_property
    def place_N(self) -> Tensor:
        """On the CPU: the place of each packed token in this rank's part; -1 for tokens of other ranks."""
        mine_n = self.mine(torch.arange(sum(self.lengths)))
        nowhere_N = mine_n.new_full((sum(self.lengths),), -1)
        return nowhere_N.index_copy(0, mine_n, torch.arange(len(mine_n)))

    @cached_property
    def scored(self) -> tuple[Tensor, Tensor]:
        """(the tokens under the loss mask whose state before them is on this rank, the places of these states)."""
        if self._mask_N is None:
            raise ValueError("a head needs documents with a loss mask")
        at_T = torch.nonzero(self._mask_N)[:, 0]
        return self.here(at_T, self.place_N[at_T - 1])

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """(the documents whose last token is on this rank, the places of these tokens), without padding."""
        count = len(self.lengths) - self._padded
        ends_R = torch.tensor(self.lengths[:count]).cumsum(0) - 1
        return self.here(torch.arange(count), self.place_N[ends_R])

    def here(self, which_T: Tensor, place_T: Tensor) -> tuple[Tensor, Tensor]:
        """The pairs (which, place) whose place is on this rank, on the device."""
        here_T = place_T >= 0
        return on_device(which_T[here_T], self.device), on_device(place_T[here_T], self.device)

    def whole(self, part: Tensor) -> Tensor:
        """See `ContextParallel.whole`."""
        return self.context.whole(part) if self.context else part

    @cached_property
    def cuts(self) -> list[DocumentSlice]:
        """The documents in each of `spans`."""
        return [DocumentSlice.of(self.lengths, span.start, span.stop, self.device) for span in self.spans]

    @cached_property
    def buckets(self) -> list[LengthBucket]:
        """On the CPU."""
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        length_D = torch.tensor(self.lengths)
        start_D = length_D.cumsum(0) - length_D
        buckets, at = [], 0
        while at < len(order):
            shortest = self.lengths[order[at]]
            limit = max(shortest * GROWTH, shortest + SLACK)
            stop = at
            while stop < len(order) and self.lengths[order[stop]] <= limit:
                stop += 1
            members = torch.tensor(order[at:stop])
            step_L = torch.arange(int(length_D[members].max()))
            index_DL = start_D[members, None] + step_L.minimum(length_D[members, None] - 1)
            keep_DL = step_L < length_D[members, None]
            buckets.append(LengthBucket(index_DL, keep_DL))
            at = stop
        return buckets

    def padded(self, *values_N: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """[D, L, …] of each of these values for each bucket, padding at the end of documents."""
        shapes = [index_DL.shape for index_DL, _ in self.buckets]
        sizes = [shape.numel() for shape in shapes]
        parts = [values.index_select(0, self.padded_P).split(sizes) for values in values_N]
        for shape, *bucket in zip(shapes, *parts, strict=True):
            yield tuple(part.unflatten(0, shape) for part in bucket)

    def unpadded(self, parts: Sequence[Tensor]) -> Tensor:
        """[N, …], the inverse of `padded` for one value."""
        return torch.cat([part_DL.flatten(0, 1) for part_DL in parts]).index_select(0, self.unpad_N)

    @cached_property
    def padded_P(self) -> Tensor:
        """The packed token at each place of all buckets in order, padding included."""
        return on_device(self._tokens_P, self.device)

    @cached_property
    def _tokens_P(self) -> Tensor:
        return torch.cat([index_DL.flatten() for index_DL, _ in self.buckets])

    @cached_property
    def unpad_N(self) -> Tensor:
        """The place of each packed token in `padded_P`."""
        real_N = torch.nonzero(torch.cat([keep_DL.flatten() for _, keep_DL in self.buckets]))[:, 0]
        return on_device(torch.empty_like(real_N).scatter_(0, self._tokens_P[real_N], real_N), self.device)


@dataclass(frozen=True)
class DocumentSlice:
    """The documents in a slice of packed tokens.

    documents: their parts in the slice · before: tokens of the first document that lie before the slice · seen: the
    keys that queries of the slice attend to, from the first document's first token on
    """

    documents: Documents
    before: int
    seen: slice

    @staticmethod
    def of(
        lengths: Sequence[int], start: int, stop: int, device: torch.device | None = None
    ) -> DocumentSlice:
        """The slice start … stop - 1 of documents of these lengths.

        With lengths 3, 4, 2, tokens 2 … 4 are the last of the first document, which has 2 before it, and 2 of the
        second; they attend to keys 0 … 4.
        """
        parts: list[int] = []
        at = before = 0
        for length in lengths:
            low, high = max(at, start), min(at + length, stop)
            if low < high:
                before = before if parts else low - at
                parts.append(high - low)
            at += length
        return DocumentSlice(Documents(parts, device), before, slice(start - before, stop))

    @cached_property
    def others(self) -> Documents:
        """All documents but the first."""
        return Documents(self.documents.lengths[1:], self.documents.device)

    @cached_property
    def key_boundaries(self) -> Tensor:
        """[documents + 1] int32: the boundaries of documents in `seen`."""
        edges = self.documents.boundaries + self.before
        edges[0] = 0
        return edges

    @property
    def longest(self) -> int:
        """The largest number of keys in one document."""
        first, *others = self.documents.lengths
        return max(first + self.before, *others)


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: Documents,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function for Hugging Face's registry: [1, N, H, E], and None for weights.

    query [1, H, N, E]; key, value [1, K, N, E], where values may have another width; s_aux [H]: sinks. Raises
    ConfigError for a model family that uses an option of CHANGES_SCORES.
    """
    _refuse(options, module)
    rule = AttentionRule(scaling, sliding_window, softcap, s_aux)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    context = documents.context
    if context is None:
        out = whole_attention(q, k, v, documents, rule)
    elif context.way == "ulysses":
        k, v = context.repeated(k), context.repeated(v)
        rule = rule._replace(sinks_H=None if s_aux is None else context.my_heads(s_aux))
        q, k, v = (context.heads_of_all_tokens(x) for x in (q, k, v))
        out = context.tokens_of_all_heads(whole_attention(q, k, v, documents, rule))
    else:
        k, v = context.all_tokens(k), context.all_tokens(v)
        slices = zip(q.chunk(len(documents.cuts)), documents.cuts, strict=True)
        out = torch.cat([slice_attention(queries, k, v, cut, rule) for queries, cut in slices])
    return out[None], None


def whole_attention(
    q_NHE: Tensor, k_NKE: Tensor, v_NKF: Tensor, documents: Documents, rule: AttentionRule = PLAIN
) -> Tensor:
    """Attention where this rank has all tokens: [N, H, F]."""
    if not _flash(q_NHE, rule):
        return _bucketed(q_NHE, k_NKE, v_NKF, documents, rule)
    edges, longest = documents.boundaries, max(documents.lengths)
    return flash(q_NHE, k_NKE, v_NKF, (edges, edges), (longest, longest), rule)


def slice_attention(
    q_nHE: Tensor, k_NKE: Tensor, v_NKF: Tensor, cut: DocumentSlice, rule: AttentionRule = PLAIN
) -> Tensor:
    """Attention for the queries of a slice, to keys of all tokens: [n, H, F]."""
    k, v = (x[cut.seen] for x in (k_NKE, v_NKF))
    if _flash(q_nHE, rule):  # aligns the keys of a document to its last query
        edges = cut.documents.boundaries, cut.key_boundaries
        return flash(q_nHE, k, v, edges, (max(cut.documents.lengths), cut.longest), rule)
    if not cut.before:
        return _bucketed(q_nHE, k, v, cut.documents, rule)
    first = cut.documents.lengths[0]
    parts = [_continued(q_nHE[:first], k[: cut.before + first], v[: cut.before + first], rule)]
    if len(cut.documents.lengths) > 1:
        k, v = (x[cut.before + first :] for x in (k, v))
        parts.append(_bucketed(q_nHE[first:], k, v, cut.others, rule))
    return torch.cat(parts)


def check_flash(config: Config, device: torch.device) -> None:
    """Warns on a GPU where flash-attn is missing. Raises ConfigError if `learner.attention` demands it and it cannot
    run."""
    half, installed = config.model.dtype != "float32", flash_attn_varlen_func is not None
    on_gpu = accelerator.shares_memory(device)
    if config.learner.attention == "flash":
        lacking = {
            "a GPU": not on_gpu,
            "model.dtype=bfloat16": not half,
            "the package flash-attn": not installed,
        }
        rule = f"needs {', '.join(what for what, is_lacking in lacking.items() if is_lacking)}"
        remedy = "pip install 'asyncrl[flash]' beside CUDA's compiler, or set learner.attention=auto"
        require(not any(lacking.values()), "learner.attention", "flash", rule, remedy)
    elif on_gpu and half and not installed:
        log.warning(
            "flash-attn is not installed: torch's scaled_dot_product_attention runs in its place, on documents that "
            "are padded to those of similar length, which is slower and takes more memory; pip install 'asyncrl[flash]'"
        )


def _flash(query: Tensor, rule: AttentionRule) -> bool:
    """Flash attention 2 has no sinks."""
    can = query.dtype in (torch.bfloat16, torch.float16) and rule.sinks_H is None
    return flash_attn_varlen_func is not None and query.device.type == accelerator.CUDA and can


def _continued(q_nHE: Tensor, k_LKE: Tensor, v_LKF: Tensor, rule: AttentionRule) -> Tensor:
    """[n, H, F], for the last n of L tokens of one document."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_nHE, k_LKE, v_LKF))
    return dense_attention(q, k, v, rule)[0].transpose(0, 1)


def _bucketed(
    q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, documents: Documents, rule: AttentionRule
) -> Tensor:
    """One dense causal attention per bucket. Padding is at the end, so no real token attends to it."""
    parts = []
    for bucket in documents.padded(q_NHE, k_NKE, v_NKE):
        q, k, v = (x.transpose(1, 2) for x in bucket)
        parts.append(dense_attention(q, k, v, rule).transpose(1, 2))
    return documents.unpadded(parts)


def _refuse(options: dict[str, Any], module: nn.Module) -> None:
    """Refuse options that would change the result. All other options of families are for other kernels."""
    for option in CHANGES_SCORES & options.keys():
        if options[option] is not None:
            config = cast(Any, module).config
            rule = f"its attention has {option!r}, which packed attention does not support"
            remedy = "use a family of docs/models.md"
            raise ConfigError("model.path", config.name_or_path or config.model_type, rule, remedy)


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
# The registry of masks has no PACKED: then transformers makes none, and does not look at positions on the device for
# documents.
