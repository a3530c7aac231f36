"""What is done to the decoder layers of a network that trains, before anything is sharded: `learner.compile` and
`learner.activation_checkpointing`. Names and values of parameters stay as they are.

    layer(…) ─▸ FSDP's hooks ─▸ checkpoint ─▸ compiled forward          the parameters are whole all the way in
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
    """Changes `network` in place.

    Under checkpointing a layer keeps its input alone and is run again in the backward pass. Nothing random is in it:
    networks are in eval mode, without dropout. A compiled layer takes any number of tokens; its attention, whose shapes
    depend on the documents, is left as it is (`attention.py`).
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
    """Of the outermost list of modules: `layers` in most families, `h` in GPT-2, and that of each stage of a pipeline.
    Those that are on another stage have no parameters here."""
    if isinstance(network, ModelStages):
        return [layer for stage in network.parts for layer in decoder_layers(stage)]
    layers = next(module for module in network.modules() if isinstance(module, nn.ModuleList))
    return [layer for layer in layers if next(layer.parameters(), None) is not None]
