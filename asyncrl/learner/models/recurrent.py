"""Gated delta nets (arXiv:2412.06464), which Qwen3-Next and Qwen3.5 have in place of most attention: each packed
document begins with an empty state.

    packed tokens ─▸ buckets of documents of similar length ─▸ transformers' own layer ─▸ packed tokens

A document is padded at its end, where no token of it comes after.

Axes:  N packed tokens · D documents of one bucket · L longest of them · E hidden size
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.errors import ConfigError
from asyncrl.learner.models.documents import Documents
from asyncrl.models.loading import delta_nets

DELTA_NET = "linear_attention"
"""The name of these layers in transformers' configurations."""


def separate_documents(network: nn.Module) -> None:
    """Let every gated delta net of a network compute each document by itself. FSDP and hooks come later."""
    for layer in delta_nets(network):
        layer.forward = partial(_by_document, layer.forward)


@torch.compiler.disable
def _by_document(
    forward: Callable[..., Tensor], hidden_states: Tensor, *, documents: Documents, **_: Any
) -> Tensor:
    """[1, N, E] from [1, N, E]. Raises ConfigError where ranks share the tokens."""
    if documents.context is not None:
        rule = "needs attention alone, and this model has gated delta nets"
        remedy = "set learner.parallel.context=1"
        raise ConfigError("learner.parallel.context", documents.context.group.size(), rule, remedy)
    parts = [forward(part_DLE) for (part_DLE,) in documents.keys.padded(hidden_states[0])]
    return documents.keys.unpadded(parts)[None]
