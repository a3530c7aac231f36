"""Fills a model from a checkpoint. A rank reads only its own boxes of a safetensors folder.

Weights in another format, and the random weights of a folder without any, are made whole on each rank by
`models.load_causal_lm`. Random weights depend on the seed alone, not on the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from asyncrl.config.schema import ModelConfig
from asyncrl.learner.backends.slices import Slices
from asyncrl.models import checkpoint_tensors, load_causal_lm
from asyncrl.sync.layout.layout import Box
from asyncrl.sync.layout.megatron import Gpt, MegatronPlace, parts_of

Read = Callable[[str, Sequence[int], Box], Tensor]
"""(name in the checkpoint, shape of the whole, box) → that part of it."""


def reader(model: ModelConfig, seed: int, key: str) -> Read:
    """A function that reads boxes of the checkpoint at `model.path`, and raises ConfigError as `Slices.read`."""
    slices = Slices.of(model.path, key)
    if slices is not None:
        return slices.read
    whole = checkpoint_tensors(load_causal_lm(model, seed, key=key))
    return lambda name, _, box: whole[name][box.slices()]


@torch.no_grad()
def fill(parameters: Mapping[str, nn.Parameter], gpt: Gpt, place: MegatronPlace, read: Read) -> None:
    """Fill a chunk's parameters. Padding rows of the vocabulary become 0."""
    for name, parameter in parameters.items():
        start = 0
        for part in parts_of(name, gpt, place):
            stop = start + part.box.shape[0]
            parameter[start:stop].copy_(read(part.name, part.shape, part.box))
            start = stop
        parameter[start:].zero_()
