"""The states of gated delta nets (Qwen3-Next, Qwen3.5) in the rows of the embedded engine's cache.

    prefill   prompts, padded on the left with zeros, which leave an empty state as it is ─▸ states of the rows
    decode    the states of the rows in use, which the layer changes in place

A state is of all tokens so far, so a row cannot take over a part of a sibling's.

Axes:  N packed tokens · A rows decoded · P prompts, T longest prompt · E hidden size
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from asyncrl.generator.engines.transformers.kv_cache import Decode, Prefill, Stores, current_pass
from asyncrl.models.loading import delta_nets


def keep_states(model: PreTrainedModel) -> bool:
    """Let the gated delta nets of a model use the engine's cache, once. Returns whether there are any."""
    layers = delta_nets(model)
    for layer in layers:
        if not isinstance(layer.forward, partial):
            layer.forward = partial(_with_states, layer, layer.forward)
    return bool(layers)


def _with_states(layer: Any, forward: Callable[..., Tensor], hidden_states: Tensor, **_: Any) -> Tensor:
    """[1, N, E] from [1, N, E]."""
    cache, of = current_pass()
    conv, state = cache.states(layer.layer_idx, partial(_empty, layer))
    hidden_NE = hidden_states[0]
    if isinstance(of, Decode):
        rows = len(of.row_N)
        for stored in (conv[:rows], state[:rows]):
            stored.masked_fill_(of.column_N.view(-1, *[1] * (stored.dim() - 1)) == 0, 0)
        return forward(hidden_NE[:, None], cache_params=_LayerStates(layer, conv[:rows], state[:rows]))[:, 0][
            None
        ]
    made = _LayerStates(layer)
    place = of.prompt_N, of.column_N + _padding(of)[of.prompt_N]
    padded_PTE = hidden_NE.new_zeros(*of.index_PT.shape, hidden_NE.shape[-1])
    padded_PTE[place] = hidden_NE
    out_PTE = forward(padded_PTE, cache_params=made)
    conv[of.row_S], state[of.row_S] = made.conv[of.prompt_S], made.state[of.prompt_S]
    return out_PTE[place][None]


def _padding(of: Prefill) -> Tensor:
    """[P]: how much shorter than the longest each prompt is. Not by bincount, which waits for a GPU."""
    prompts, longest = of.index_PT.shape
    lengths_P = of.prompt_N.new_zeros(prompts).index_add(0, of.prompt_N, torch.ones_like(of.prompt_N))
    return longest - lengths_P


def _empty(layer: Any, rows: int) -> Stores:
    """The state of the convolution and of the delta rule."""
    weight = layer.conv1d.weight
    shape = rows, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    return weight.new_zeros(rows, layer.conv_dim, layer.conv_kernel_size), weight.new_zeros(
        shape, dtype=torch.float32
    )


class _LayerStates:
    """The states of one layer, in the form in which transformers' layers take a cache; none to begin with."""

    def __init__(self, layer: Any, *before: Tensor) -> None:
        self._states = LinearAttentionLayer()
        self.layers = {layer.layer_idx: self._states}
        if before:
            self._states.conv_states[0], self._states.recurrent_states[0] = before
            self._states.conv_kernel_size[0] = layer.conv_kernel_size
            for known in (
                self._states.has_previous_state,
                self._states.is_conv_states_initialized,
                self._states.is_recurrent_states_initialized,
            ):
                known[0] = True

    @property
    def conv(self) -> Tensor:
        return cast(Tensor, self._states.conv_states[0])

    @property
    def state(self) -> Tensor:
        return cast(Tensor, self._states.recurrent_states[0])

    def has_previous_state(self, *_: int, **__: int) -> bool:
        return bool(self._states.has_previous_state[0])

    def update_conv_state(self, values: Tensor, *_: int, **options: Any) -> Tensor:
        return self._states.update_conv_state(values, **options)

    def update_recurrent_state(self, values: Tensor, *_: int, **options: Any) -> Tensor:
        return self._states.update_recurrent_state(values, **options)
