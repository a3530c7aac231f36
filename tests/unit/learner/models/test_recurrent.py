"""Layers with a state over tokens: the state begins anew with each document, and with each use of a row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncrl.errors import ConfigError
from asyncrl.generator.engines.transformers.recurrent_rows import _empty
from asyncrl.learner.models.documents import Documents
from asyncrl.learner.models.recurrent import separate_documents


class SumsGatedDeltaNet(nn.Module):
    """Its state is the sum of all tokens so far."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.cumsum(1)


def test_each_document_begins_with_an_empty_state() -> None:
    layer = SumsGatedDeltaNet()
    separate_documents(nn.Sequential(layer))
    hidden = torch.arange(1.0, 31.0)[None, :, None]
    found = layer(hidden, documents=Documents([3, 25, 2]))[0, :, 0]
    expected = torch.cat([part.cumsum(0) for part in hidden[0, :, 0].split([3, 25, 2])])
    assert torch.equal(found, expected)


def test_tokens_that_ranks_share_are_refused() -> None:
    layer = SumsGatedDeltaNet()
    separate_documents(layer)
    context: Any = SimpleNamespace(group=SimpleNamespace(size=lambda: 2), multiple=2)
    with pytest.raises(ConfigError, match=r"learner\.parallel\.context = 2.*gated delta nets"):
        layer(torch.zeros(1, 4, 1), documents=Documents([4], context=context))


def test_states_of_a_model_in_half_precision_add_up_in_float32() -> None:
    shape = {"num_v_heads": 2, "head_k_dim": 3, "head_v_dim": 4, "conv_dim": 5, "conv_kernel_size": 6}
    weight = torch.zeros(1, dtype=torch.bfloat16)
    conv, state = _empty(SimpleNamespace(conv1d=SimpleNamespace(weight=weight), **shape), 7)
    assert (conv.shape, conv.dtype) == ((7, 5, 6), torch.bfloat16)
    assert (state.shape, state.dtype) == ((7, 2, 3, 4), torch.float32)
