"""A static KV cache and the attention that reads and writes it, for any model of transformers' registry.

A forward is always one packed row of tokens [1, N], of one of two kinds:

    Prefill   the prompts of new requests, one after another; each attends to itself, and its keys and values
              are stored in the rows of all samples of the request
    Decode    one token for each of the rows 0..A-1; it is stored at the row's position and attends to the row

Axes:  N tokens of a forward · A rows decoded · P prompts, T longest prompt · S rows filled by a prefill
       H query heads, K key/value heads, G = H / K · L columns in use, M columns of the cache · D head size
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "asyncrl_slots"
"""The name in transformers' registry. It has no mask function: transformers then builds no mask."""


class UnsupportedAttentionError(NotImplementedError):
    """The model needs an attention that this cache does not have."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """index_PT: where each prompt token is in the packed row (padding: the last one again)
    prompt_N, column_N: the inverse · row_S, prompt_S: the cache rows to fill, and with which prompt."""

    index_PT: Tensor
    prompt_N: Tensor
    column_N: Tensor
    row_S: Tensor
    prompt_S: Tensor


@dataclass(frozen=True, slots=True)
class Decode:
    """position_A: the column each row writes · hidden_AL: True at the columns a row must not see."""

    row_A: Tensor
    position_A: Tensor
    hidden_AL: Tensor


class KVCache:
    """Keys and values of every layer, [rows, K, M, D] each, allocated when a layer first runs."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def move_rows(self, source: Tensor, destination: Tensor, columns: int) -> None:
        """Copy the first `columns` of whole rows onto others; the two sets do not meet."""
        for pair in self.layers.values():
            for store in pair:
                store[destination, :, :columns] = store[source, :, :columns]

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if index not in self.layers:
            self.layers[index] = (self._store(key), self._store(value))
        return self.layers[index]

    def _store(self, like_1KND: Tensor) -> Tensor:
        # Zeros, not the memory as it is: hidden columns are multiplied by 0, and 0 * NaN is NaN.
        return like_1KND.new_zeros(self.rows, like_1KND.shape[1], self.columns, like_1KND.shape[3])


_pass = threading.local()


@contextmanager
def attending(cache: KVCache, of: Prefill | Decode) -> Iterator[None]:
    """Within this block, on this thread, a model with ATTENTION uses `cache`."""
    _pass.cache, _pass.of = cache, of
    try:
        yield
    finally:
        del _pass.cache, _pass.of


def cached_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function: query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
    cache, of = _pass.cache, _pass.of
    _check(options, cache.columns)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    stores = cache.layer(module.layer_idx, key, value)
    if isinstance(of, Decode):
        return _decode(query, key, value, stores, of, scale), None
    return _prefill(query, key, value, stores, of, scale), None


def _decode(
    query: Tensor, key: Tensor, value: Tensor, stores: tuple[Tensor, Tensor], of: Decode, scale: float
) -> Tensor:
    keys, values = stores
    keys[of.row_A, :, of.position_A] = key[0].transpose(0, 1)
    values[of.row_A, :, of.position_A] = value[0].transpose(0, 1)
    A, L = of.hidden_AL.shape
    K = keys.shape[1]
    query_AKGD = query[0].transpose(0, 1).reshape(A, K, -1, query.shape[-1])
    # Views of the cache: with the active rows first, nothing is gathered.
    score_AKGL = (query_AKGD * scale) @ keys[:A, :, :L].transpose(-1, -2)
    score_AKGL = score_AKGL.float().masked_fill_(of.hidden_AL[:, None, None], float("-inf"))
    out_AKGD = score_AKGL.softmax(-1).to(values.dtype) @ values[:A, :, :L]
    return out_AKGD.reshape(1, A, query.shape[1], -1)


def _prefill(
    query: Tensor, key: Tensor, value: Tensor, stores: tuple[Tensor, Tensor], of: Prefill, scale: float
) -> Tensor:
    query_PHTD, key_PKTD, value_PKTD = (
        x[0].transpose(0, 1)[of.index_PT].transpose(1, 2) for x in (query, key, value)
    )
    T = of.index_PT.shape[1]
    stores[0][of.row_S, :, :T] = key_PKTD[of.prompt_S]
    stores[1][of.row_S, :, :T] = value_PKTD[of.prompt_S]
    # Padding stands at the end of a prompt: causal order keeps it out of sight of every real token.
    out_PHTD = F.scaled_dot_product_attention(
        query_PHTD,
        key_PKTD,
        value_PKTD,
        is_causal=True,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out_PHTD.transpose(1, 2)[of.prompt_N, of.column_N][None]


def _check(options: dict[str, Any], columns: int) -> None:
    window = options.get("sliding_window")
    if window is not None and window < columns:
        raise UnsupportedAttentionError(f"a sliding window of {window} tokens")
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if options.get(name) is not None:
            raise UnsupportedAttentionError(f"the attention option {name!r}")


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, cached_attention)
