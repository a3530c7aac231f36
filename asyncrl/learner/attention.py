"""Causal attention within each document of a packed sequence, for any Hugging Face model that takes its
attention from the registry: load it with `attn_implementation=PACKED` and call it with
`documents=Documents(lengths)`.

Hugging Face hands unknown keyword arguments of a model's forward on to the attention function, so the
documents travel with the call: no global, no context.

Axes:  N packed tokens · D documents of one bucket · L longest of them · H query heads · K key heads · E head
size
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

PACKED = "asyncrl_packed"

GROWTH, SLACK = 1.35, 8
"""Documents share a bucket while the longest is within GROWTH times, or SLACK tokens of, the shortest: a
short list of large attention calls that wastes little on padding."""


class Bucket(NamedTuple):
    """Documents of similar length: index_DL tells where each token is in the packed sequence (clamped past a
    document's end), keep_DL which of them are real."""

    index_DL: Tensor
    keep_DL: Tensor


class Documents:
    """Where one document ends and the next begins, in the forms that attention kernels want, made when first
    asked."""

    def __init__(self, lengths: Sequence[int], device: torch.device | None = None) -> None:
        self.lengths, self.device = tuple(lengths), device

    @cached_property
    def boundaries(self) -> Tensor:
        """[documents + 1] int32: 0, then where each document ends."""
        ends = torch.tensor(self.lengths).cumsum(0)
        return F.pad(ends, (1, 0)).to(self.device, torch.int32)

    @cached_property
    def buckets(self) -> list[Bucket]:
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
            buckets.append(Bucket(index_DL.to(self.device), keep_DL.to(self.device)))
            at = stop
        return buckets

    @cached_property
    def unbucket_N(self) -> Tensor:
        """Where each packed token is among the real tokens of all buckets, one bucket after another."""
        place_N = torch.cat([index_DL[keep_DL] for index_DL, keep_DL in self.buckets])
        return torch.empty_like(place_N).scatter_(0, place_N, torch.arange(len(place_N), device=self.device))


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
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, N, E], key and value [1, K, N, E] → [1, N, H, E]. The signature is Hugging Face's.

    Raises NotImplementedError where a sliding window would cut a document.
    """
    if sliding_window is not None and max(documents.lengths) > sliding_window:
        raise NotImplementedError(f"documents longer than the sliding window of {sliding_window} tokens")
    q_NHE, k_NKE, v_NKE = (x[0].transpose(0, 1) for x in (query, key, value))
    half = query.dtype in (torch.bfloat16, torch.float16)
    if flash_attn_varlen_func is not None and query.is_cuda and half:
        edges, longest = documents.boundaries, max(documents.lengths)
        out_NHE = flash_attn_varlen_func(
            q_NHE, k_NKE, v_NKE, edges, edges, longest, longest, softmax_scale=scaling, causal=True
        )
    else:
        out_NHE = _bucketed(q_NHE, k_NKE, v_NKE, documents, scaling)
    return out_NHE[None], None


def _bucketed(
    q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, documents: Documents, scaling: float | None
) -> Tensor:
    """One dense causal attention per bucket. Padding is at the end, so no real token can see it."""
    grouped = q_NHE.shape[1] != k_NKE.shape[1]
    parts = []
    for index_DL, keep_DL in documents.buckets:
        q, k, v = (x[index_DL].transpose(1, 2) for x in (q_NHE, k_NKE, v_NKE))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        parts.append(out.transpose(1, 2)[keep_DL])
    return torch.cat(parts)[documents.unbucket_N]


def _no_mask(*_: Any, **__: Any) -> None:
    """The documents say all there is to say."""


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, _no_mask)
