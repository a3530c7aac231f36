"""The checkpoint that a model starts from, box by box: no rank reads more of a safetensors folder than it holds.

A folder with a config.json alone starts from the random weights that `models.load_causal_lm` makes, the same for every
backend under one seed; it, and one whose weights are in another format, is loaded whole on each rank.
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
    """Of the checkpoint at `model.path`. Raises ConfigError of `key` if there is none; what it returns, as
    `Slices.read`."""
    slices = Slices.of(model.path, key)
    if slices is not None:
        return slices.read
    whole = checkpoint_tensors(load_causal_lm(model, seed, key=key))
    return lambda name, _, box: whole[name][box.slices()]


@torch.no_grad()
def fill(parameters: Mapping[str, nn.Parameter], gpt: Gpt, place: MegatronPlace, read: Read) -> None:
    """Load a chunk's parameters; rows that only pad the vocabulary become 0. Raises what `read` does."""
    for name, parameter in parameters.items():
        start = 0
        for part in parts_of(name, gpt, place):
            stop = start + part.box.shape[0]
            parameter[start:stop].copy_(read(part.name, part.shape, part.box))
            start = stop
        parameter[start:].zero_()
