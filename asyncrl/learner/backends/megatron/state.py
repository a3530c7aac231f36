"""A Megatron learner's tensors on disk, in the names and boxes of `learner/backends/storage.py`.

    policy.NAME · optimizer.MOMENT.NAME · critic.NAME · …      every rank writes the boxes that it steps on

A checkpoint does not depend on tp, pp, ep or dp: it loads at other sizes, and that of a dense model also in the other
backend.

A rank reads only its own boxes of the safetensors that a model starts from. Weights in another format, and the random
weights of a folder without any, are made whole on each rank by `models.load_causal_lm`. Random weights depend on the
seed alone, not on the backend.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from asyncrl.config.schema import Config, ModelConfig
from asyncrl.learner.backends import storage
from asyncrl.learner.backends.boxes import Boxes, as_one_box, whole_bytes
from asyncrl.learner.backends.megatron.boxes import BoxShard, cuts
from asyncrl.learner.backends.megatron.model import MegatronModel, Shard, StepCounter
from asyncrl.learner.backends.slices import Slices
from asyncrl.learner.models.roles import POLICY
from asyncrl.models import checkpoint_tensors, load_causal_lm, load_model_config
from asyncrl.sync.layout.layout import Box
from asyncrl.sync.layout.megatron import Gpt, MegatronPlace, parts_of

Read = Callable[[str, Sequence[int], Box], Tensor]
"""(name in the checkpoint, shape of the whole, box) → that part of it."""


def save_models(folder: Path, models: Mapping[str, MegatronModel]) -> None:
    """Collective: write these models, their optimizers and torch's random state. Raises OSError if the disk is full."""
    state, _ = _state(models, copies=False)
    storage.save(folder, state)


def stage_models(models: Mapping[str, MegatronModel]) -> dict[str, Any]:
    """A copy of everything that `save` writes, in host memory, for `storage.save`."""
    state, _ = _state(models, copies=False)
    return {name: x.copied() if isinstance(x, Boxes) else x.clone() for name, x in state.items()}


def load_models(folder: Path, models: Mapping[str, MegatronModel]) -> None:
    """Collective: the inverse of `save`. Raises ConfigError if the folder lacks a trained model."""
    found = storage.models_in(folder)
    for name, model in models.items():
        model.changes |= name in found  # a reference that had been updated
    changing = {name: model for name, model in models.items() if model.changes}
    storage.require_models(folder, changing)
    state, counters = _state(changing, copies=True)
    storage.load_state(folder, state)
    for counter in counters:
        counter.put_back()
    for model in changing.values():
        model.publish_masters()
    torch.set_rng_state(state[storage.RNG])


def export_policy(folder: Path, policy: MegatronModel, sizes: Mapping[str, int]) -> None:
    """Collective: write the policy's weights as Hugging Face safetensors."""
    layout, views = policy.in_checkpoint()
    storage.write_hf_weights(
        folder, {name: as_one_box(layout[name], view) for name, view in views.items()}, sizes
    )


def export_bytes(policy: MegatronModel) -> dict[str, int]:
    """The bytes of each whole parameter of which this rank has a part."""
    return whole_bytes(policy.in_checkpoint()[0])


def export_configs(folder: Path, config: Config) -> None:
    """Write the files beside the weights."""
    model = config.model
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(
            load_model_config(model), dtype=getattr(torch, model.dtype)
        )
    with suppress(OSError):  # the folder has none
        causal_lm.generation_config = GenerationConfig.from_pretrained(model.path, local_files_only=True)
    storage.write_hf_configs(folder, causal_lm, config)


def _state(models: Mapping[str, MegatronModel], copies: bool) -> tuple[dict[str, Any], list[StepCounter]]:
    """(flat names → live tensors, counters of steps). copies: include copies of tied weights, which are loaded but not
    saved."""
    state: dict[str, Any] = {storage.RNG: torch.get_rng_state()}
    counters: list[StepCounter] = []
    for model_name, model in models.items():
        shapes: dict[str, tuple[int, ...]] = {}
        pieces = defaultdict[str, list[tuple[Box, Tensor]]](list)
        for shard in model.shards():
            if shard.copy and not copies:
                continue
            counters += [shard.counter] if shard.counter is not None else []
            for cut, views in _cut(shard):
                if shard.counter is not None:
                    state[_name(model_name, "step", cut.name)] = shard.counter.value
                for kind, view in views.items():
                    name = _name(model_name, kind, cut.name)
                    shapes[name] = cut.shape
                    pieces[name].append((cut.box, view))
        state |= {name: Boxes(shapes[name], found) for name, found in pieces.items()}
    return state, counters


def _name(model: str, kind: str, parameter: str) -> str:
    """A flat name. kind: "" for the master."""
    if not kind:
        return f"{model}.{parameter}"
    return f"{storage.OPTIMIZER}.{kind}.{parameter if model == POLICY else f'{model}.{parameter}'}"


def _cut(shard: Shard) -> Iterator[tuple[BoxShard, dict[str, Tensor]]]:
    """Each checkpoint box of a shard, with views of the shard's tensors."""
    stop = shard.start + len(shard.tensors[""])
    for cut in cuts(shard.parts, shard.shape, shard.start, stop):
        here = slice(cut.start - shard.start, cut.stop - shard.start)
        yield cut, {kind: flat[here].view(cut.box.shape) for kind, flat in shard.tensors.items()}


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
