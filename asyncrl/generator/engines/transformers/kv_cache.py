"""A static KV cache and the attention that reads and writes it, for any model of transformers' registry.

A forward is always one packed row of tokens [1, N], of one of two kinds:

    Prefill   the prompts of new requests, one after another; each attends to itself, and its keys and values
              are stored in the rows of all samples of the request
    Decode    the last token of each of the rows 0..A-1, and drafts behind it; each is stored at its column and attends
              to the row up to there

Axes:  N tokens of a forward · A rows decoded · P prompts · T longest prompt, or most tokens of a row decoded
       S rows filled by a prefill
       H query heads, K key/value heads, G = H / K · L columns in use, M columns of the cache · D head size
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncrl.models.attention import AttentionRule, attention_weights, dense_attention

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
    """row_N, column_N: where each token is stored, row by row · column_L: the columns in use · column_AT: those of a
    row's tokens · hidden_ATL: True at the columns that a token must not see · index_AT: where a row's tokens are in the
    packed row, up to T the last one again · offset_N: the inverse. Both None: each row has one token."""

    row_N: Tensor
    column_N: Tensor
    column_L: Tensor
    column_AT: Tensor
    hidden_ATL: Tensor
    index_AT: Tensor | None = None
    offset_N: Tensor | None = None


Stores = tuple[Tensor, Tensor]
"""The memory of one layer: keys and values [rows, K, M, D], or states [rows, …] of two kinds, see
`recurrent_rows.py`."""


class KVCache:
    """Keys and values, or states, of every layer, allocated when it first runs."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.layers: dict[int, Stores] = {}
        self.recurrent: dict[int, Stores] = {}

    def tensors(self) -> Iterator[Tensor]:
        """The stores of all layers that have run."""
        for stores in (*self.layers.values(), *self.recurrent.values()):
            yield from stores

    def move_rows(self, source: Tensor, destination: Tensor, columns: int) -> None:
        """Copy the first `columns` of whole rows onto others; the two sets do not meet."""
        for pair in self.layers.values():
            for store in pair:
                store[destination, :, :columns] = store[source, :, :columns]
        for pair in self.recurrent.values():
            for store in pair:
                store[destination] = store[source]

    def states(self, index: int, empty: Callable[[int], Stores]) -> Stores:
        """The states of a layer without keys. empty: makes those of so many rows"""
        if index not in self.recurrent:
            self.recurrent[index] = empty(self.rows)
        return self.recurrent[index]

    def layer(self, index: int, key: Tensor, value: Tensor) -> Stores:
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


def current_pass() -> tuple[KVCache, Prefill | Decode]:
    """The cache and the pass that this thread is `attending` with."""
    return _pass.cache, _pass.of


def cached_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function: query [1, H, N, D], key and value [1, K, N, D], sinks s_aux [H] -> [1, N, H, D]."""
    for name in ("position_bias", "head_mask"):
        if options.get(name) is not None:
            raise UnsupportedAttentionError(f"the attention option {name!r}")
    cache, of = current_pass()
    rule = AttentionRule(scaling, sliding_window, softcap, s_aux)
    stores = cache.layer(cast(int, module.layer_idx), key, value)
    if isinstance(of, Decode):
        return _decode(query, key, value, stores, of, rule), None
    return _prefill(query, key, value, stores, of, rule), None


def _decode(
    query: Tensor, key: Tensor, value: Tensor, stores: Stores, of: Decode, rule: AttentionRule
) -> Tensor:
    keys, values = stores
    keys[of.row_N, :, of.column_N] = key[0].transpose(0, 1)
    values[of.row_N, :, of.column_N] = value[0].transpose(0, 1)
    A, T, L = of.hidden_ATL.shape
    H, K, D = query.shape[1], keys.shape[1], query.shape[-1]
    query_NHD = query[0].transpose(0, 1)
    query_ATHD = query_NHD if of.index_AT is None else query_NHD[of.index_AT]
    query_AKGTD = query_ATHD.reshape(A, T, K, -1, D).permute(0, 2, 3, 1, 4)
    # Views of the cache: with the active rows first, nothing is gathered.
    score_AKXL = (query_AKGTD * rule.scale(D)).reshape(A, K, -1, D) @ keys[:A, :, :L].transpose(-1, -2)
    hidden_ATL = of.hidden_ATL
    if rule.window is not None:
        hidden_ATL = hidden_ATL | (of.column_L <= of.column_AT[:, :, None] - rule.window)
    sinks_KG1 = None if rule.sinks_H is None else rule.sinks_H.view(K, -1, 1)
    score_AKGTL = score_AKXL.view(A, K, -1, T, L).float()
    weight_AKGTL = attention_weights(score_AKGTL, hidden_ATL[:, None, None], rule.softcap, sinks_KG1)
    out_AKXD = weight_AKGTL.to(values.dtype).reshape(A, K, -1, L) @ values[:A, :, :L]
    out_ATHD = out_AKXD.view(A, K, -1, T, out_AKXD.shape[-1]).permute(0, 3, 1, 2, 4).reshape(A, T, H, -1)
    return out_ATHD.transpose(0, 1) if of.offset_N is None else out_ATHD[of.row_N, of.offset_N][None]


def _prefill(
    query: Tensor, key: Tensor, value: Tensor, stores: Stores, of: Prefill, rule: AttentionRule
) -> Tensor:
    query_PHTD, key_PKTD, value_PKTD = (
        x[0].transpose(0, 1)[of.index_PT].transpose(1, 2) for x in (query, key, value)
    )
    T = of.index_PT.shape[1]
    stores[0][of.row_S, :, :T] = key_PKTD[of.prompt_S]
    stores[1][of.row_S, :, :T] = value_PKTD[of.prompt_S]
    # Padding stands at the end of a prompt: causal order keeps it out of sight of every real token.
    out_PHTD = dense_attention(query_PHTD, key_PKTD, value_PKTD, rule)
    return out_PHTD.transpose(1, 2)[of.prompt_N, of.column_N][None]


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, cached_attention)
