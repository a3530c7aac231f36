"""`learner.compile` and `learner.activation_checkpointing`, applied to decoder layers before they are sharded.

layer(…) ─▸ FSDP's hooks ─▸ checkpoint ─▸ compiled forward   parameters are whole from the first hook on
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from asyncrl.config.schema import LearnerConfig
from asyncrl.learner.backends.fsdp.stages import ModelStages


def prepare_layers(network: nn.Module, config: LearnerConfig) -> None:
    """Change the layers of a network that trains, in place. Its parameters keep their names and values.

    Under checkpointing a layer keeps its input alone and runs again in the backward pass. No random state is saved for
    it: networks are in eval mode, without dropout. A compiled layer takes any number of tokens; attention, whose shapes
    depend on the documents, is not compiled (`attention.py`).
    """
    for layer in decoder_layers(network):
        forward: Callable[..., Any] = layer.forward
        if config.compile:
            forward = torch.compile(forward, dynamic=True)
        if config.activation_checkpointing == "layers":
            forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        if forward is not layer.forward:
            layer.forward = forward


def decoder_layers(network: nn.Module) -> list[nn.Module]:
    """The layers in the outermost list of modules (`layers` in most families, `h` in GPT-2), or in that of each
    pipeline stage of this rank. Layers of other stages are left out: they have no parameters here."""
    if isinstance(network, ModelStages):
        return [layer for stage in network.parts for layer in decoder_layers(stage)]
    layers = next(module for module in network.modules() if isinstance(module, nn.ModuleList))
    return [layer for layer in layers if next(layer.parameters(), None) is not None]
