"""A static KV cache and the attention that reads and writes it, for any model of transformers' registry.

A forward is always one packed row of tokens [1, N], of one of two kinds:

    Prefill   the prompts of new requests, one after another; each attends to itself, and its keys and values
              are stored in the rows of all samples of the request
    Decode    the last token of each of the rows 0..A-1, and drafts behind it; each is stored at its column and attends
              to the row up to there

Axes:  N tokens of a forward · A rows decoded · X of them that have drafts · P prompts
       T longest prompt, or most drafts · S rows filled by a prefill
       H query heads, K key/value heads, G = H / K · L columns in use, M columns of the cache · D head size
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

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


class Drafts(NamedTuple):
    """Tokens behind the first ones of some rows. row_X: these rows · index_XT: where the tokens are in the packed row,
    up to T the last one of a row again · column_XT: their columns · hidden_XTL: as `Decode` has it"""

    row_X: Tensor
    index_XT: Tensor
    column_XT: Tensor
    hidden_XTL: Tensor


@dataclass(frozen=True, slots=True)
class Decode:
    """row_N, column_N: where each token is stored, row by row · column_L: the columns in use · first_A: where the first
    token of each row is in the packed row, None: there are no others · hidden_AL: True at the columns that it must not
    see · drafts: the other tokens, those of rows with about as many together."""

    row_N: Tensor
    column_N: Tensor
    column_L: Tensor
    hidden_AL: Tensor
    first_A: Tensor | None = None
    drafts: tuple[Drafts, ...] = ()


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
    A, L = of.hidden_AL.shape
    query_NHD = query[0].transpose(0, 1)
    column_A, query_AHD = of.column_N, query_NHD
    if of.first_A is not None:
        column_A, query_AHD = column_A[of.first_A], query_AHD[of.first_A]
    # Views of the cache: with the active rows first, nothing is gathered.
    stored = keys[:A, :, :L], values[:A, :, :L]
    first = query_AHD[:, None], column_A[:, None], of.hidden_AL[:, None]
    out_AHD = _attend(*first, *stored, of.column_L, rule)[:, 0]
    if of.first_A is None:
        return out_AHD[None]
    out_NHD = out_AHD.new_empty(len(query_NHD), *out_AHD.shape[1:])
    out_NHD[of.first_A] = out_AHD
    for row_X, index_XT, column_XT, hidden_XTL in of.drafts:
        gathered = keys[row_X, :, :L], values[row_X, :, :L]
        out_NHD[index_XT] = _attend(query_NHD[index_XT], column_XT, hidden_XTL, *gathered, of.column_L, rule)
    return out_NHD[None]


def _attend(
    query_ATHD: Tensor,
    column_AT: Tensor,
    hidden_ATL: Tensor,
    key_AKLD: Tensor,
    value_AKLD: Tensor,
    column_L: Tensor,
    rule: AttentionRule,
) -> Tensor:
    """[A, T, H, D]: T tokens of each row over its keys."""
    A, T, H, D = query_ATHD.shape
    K = key_AKLD.shape[1]
    query_AKXD = query_ATHD.reshape(A, T, K, -1, D).permute(0, 2, 3, 1, 4).reshape(A, K, -1, D)
    score_AKXL = (query_AKXD * rule.scale(D)) @ key_AKLD.transpose(-1, -2)
    if rule.window is not None:
        hidden_ATL = hidden_ATL | (column_L <= column_AT[:, :, None] - rule.window)
    sinks_KG1 = None if rule.sinks_H is None else rule.sinks_H.view(K, -1, 1)
    score_AKGTL = score_AKXL.view(A, K, -1, T, len(column_L)).float()
    weight_AKGTL = attention_weights(score_AKGTL, hidden_ATL[:, None, None], rule.softcap, sinks_KG1)
    out_AKXD = weight_AKGTL.to(value_AKLD.dtype).reshape(A, K, -1, len(column_L)) @ value_AKLD
    return out_AKXD.view(A, K, -1, T, out_AKXD.shape[-1]).permute(0, 3, 1, 2, 4).reshape(A, T, H, -1)


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
