"""flash-attn's function, which needs a GPU, in plain torch."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """By its documentation: documents between the ends, the last query at the last key;
    window_size: keys to the left and right of a query's own, -1 for all; softcap 0 for none."""
    assert causal
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "the kernel has one head size"
    out = torch.full_like(q, math.nan)
    left, _ = window_size
    spans_q, spans_k = (list(pairwise(ends.tolist())) for ends in (ends_q, ends_k))
    for (a, b), (c, d) in zip(spans_q, spans_k, strict=True):
        assert b - a <= longest_q
        assert d - c <= longest_k
        for i in range(a, b):
            at = d - b + i
            low = c if left < 0 else max(c, at - left)
            score = torch.einsum("he,nhe->hn", q[i], k[low : at + 1]) * (softmax_scale or q.shape[-1] ** -0.5)
            score = softcap * torch.tanh(score / softcap) if softcap else score
            out[i] = torch.einsum("hn,nhf->hf", score.softmax(-1), v[low : at + 1])
    return out
