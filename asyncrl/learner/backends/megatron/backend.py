"""The Megatron-core backend: this rank's place in the grid, and its part of all models.

It computes on GPUs, one process each, as Megatron-core does. Checkpoints have the names and boxes of
`learner/backends/storage.py`:

    policy.NAME · optimizer.MOMENT.NAME · critic.NAME · …      every rank writes the boxes that it steps on

A checkpoint does not depend on tp, cp, pp, ep or dp: it loads at other sizes, and that of a dense model also in the
other backend.

A rank reads only its own boxes of the safetensors that a model starts from. Quantized weights, those in another format,
and the random weights of a folder without any, are made whole on each rank by `models.load_causal_lm`. Random weights
depend on the seed alone, not on the backend.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from asyncrl.config.schema import Config, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.algorithms.roles import POLICY
from asyncrl.learner.backends import storage
from asyncrl.learner.backends.backend import Backend, check_reference
from asyncrl.learner.backends.checkpoint_source import Slices
from asyncrl.learner.backends.megatron.adapters import PartsOf, adapters_at_start, add_adapters
from asyncrl.learner.backends.megatron.architecture import architecture
from asyncrl.learner.backends.megatron.boxes import BoxShard, cuts
from asyncrl.learner.backends.megatron.grid import check_model, make_grid
from asyncrl.learner.backends.megatron.model import MegatronModel, Shard, StepCounter
from asyncrl.learner.backends.megatron.network import Head, PackedGpt, build
from asyncrl.learner.models.networks import (
    Critic,
    blueprint,
    check_vocabularies,
    likely_tokens,
    named_constants,
)
from asyncrl.learner.parallel.context import ContextParallel
from asyncrl.learner.ranks import process_group
from asyncrl.models.loading import checkpoint_tensors, load_causal_lm, load_model_config
from asyncrl.sync.layout.layout import Box
from asyncrl.sync.layout.megatron import Gpt, megatron_parts
from asyncrl.system.rank_process import rank_and_world

Read = Callable[[str, Sequence[int], Box], Tensor]
"""(name in the checkpoint, shape of the whole, box) → that part of it."""


class MegatronBackend(Backend):
    """`Backend` with Megatron-core, on GPUs."""

    policy: MegatronModel
    _models: dict[str, MegatronModel]

    def __init__(self, config: Config, models: Collection[str] = ()) -> None:
        """models: those beside the policy, from `roles.ROLES`. Raises ConfigError if there is no GPU, or a model
        cannot be loaded, or does not fit the policy or `learner.parallel`."""
        check_vocabularies(models, config)
        logging.getLogger("megatron").setLevel(logging.WARNING)  # else it lists every parameter
        rank, world = rank_and_world()
        self._grid = make_grid(config.learner.parallel, rank, world)
        super().__init__(config, models, self._grid.data_rank, self._grid.data_leaders)
        self._device = _device(config)
        # Megatron needs a group even for one process.
        process_group.join_process_group(self._device, config, alone=world == 1)
        self._initialise()
        self._context = (
            ContextParallel(ps.get_context_parallel_group(), config.learner.parallel.context_way)
            if self._grid.context > 1
            else None
        )
        self._models = {}
        for name in (POLICY, *sorted(models)):  # the same order on every rank
            if not self.is_base(name):
                self._models[name] = self._load(name)
        self.policy = self._models[POLICY]
        if "reference" in models and config.reference.update_every is not None:
            check_reference(self._models["reference"].gpt == self.policy.gpt, config)

    def _initialise(self) -> None:
        """Make Megatron's process groups, in the order of `grid.py`."""
        found = self._grid
        ps.initialize_model_parallel(
            tensor_model_parallel_size=found.tensor,
            pipeline_model_parallel_size=found.pipeline,
            virtual_pipeline_model_parallel_size=found.chunks if found.chunks > 1 else None,
            context_parallel_size=found.context,
            expert_model_parallel_size=found.expert,
            expert_tensor_parallel_size=found.expert_tensor,
            distributed_timeout_minutes=int(process_group.COLLECTIVE_DEADLINE.total_seconds() // 60),
        )
        model_parallel_cuda_manual_seed(self._config.run.seed)

    def _load(self, name: str) -> MegatronModel:
        config, found = self._config, self._grid
        plan = blueprint(name, config)
        model = dataclasses.replace(config.model, path=plan.path)
        hf = load_model_config(model, plan.key)
        shape = architecture(hf, plan.key, plan.path)
        check_model(found, shape.gpt, config.learner.parallel)
        head: Head = "values" if plan.make is Critic else "logprobs"
        recomputes = config.learner.activation_checkpointing == "layers" and plan.optimizer is not None
        chunks = build(shape, found, getattr(torch, model.dtype), hf, head, self._device, recomputes)
        likely = likely_tokens(name, config)
        for chunk in chunks:
            chunk.wide_head, chunk.likely = model.wide_head, likely
        gpt, read = shape.padded(found.tensor), _reader(model, config.run.seed, plan.key)
        for chunk in chunks:
            tensors = {**chunk.body_parameters(), **chunk.constants()}
            _fill(tensors, partial(megatron_parts, gpt=gpt, place=chunk.place), read)
        adapted = name == POLICY and model.lora.rank > 0
        if adapted:
            self._add_adapters(chunks, gpt, model)
        merges, policy = adapted and not model.lora.travels, self._models.get(POLICY)
        shares = self._config.learner.shares
        return MegatronModel(
            name, chunks, gpt, found, plan.optimizer, self._device, policy, merges, shares, self._context
        )

    def _add_adapters(self, chunks: Sequence[PackedGpt], gpt: Gpt, model: ModelConfig) -> None:
        whole = adapters_at_start(model, self._config.run.seed, gpt, chunks[0].place)
        for chunk in chunks:
            add_adapters(chunk, model.lora, partial(chunk.parts, gpt=gpt), self._grid.sequence)
            parameters = chunk.adapter_parameters()
            _fill(parameters, partial(chunk.parts, gpt=gpt), lambda name, _, box: whole[name][box.slices()])

    def close(self) -> None:
        ps.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _state(self) -> dict[str, Any]:
        return _state_of(self._models)[0]

    def _load_state(self, folder: Path) -> None:
        state, counters = _state_of(self._models, copies=True)
        storage.load_state(folder, state)
        for counter in counters:
            counter.put_back()
        torch.set_rng_state(state[storage.RNG])

    def _constants(self) -> Mapping[str, Tensor]:
        """Those of this rank's stage."""
        policy = self.policy
        return {
            megatron_parts(name, policy.gpt, chunk.place)[0].name: held
            for chunk in policy.chunks
            for name, held in chunk.constants().items()
        }

    def _causal_lm(self) -> PreTrainedModel:
        model = self._config.model
        with torch.device("meta"):
            causal_lm = AutoModelForCausalLM.from_config(
                load_model_config(model), dtype=getattr(torch, model.dtype)
            )
        with suppress(OSError):  # the folder has none
            causal_lm.generation_config = GenerationConfig.from_pretrained(model.path, local_files_only=True)
        return causal_lm


def _device(config: Config) -> torch.device:
    process_group.own_device()
    try:
        return torch.device(torch.cuda.current_device())
    except (RuntimeError, AssertionError) as error:
        rule = f"computes on GPUs, and there is none ({str(error).splitlines()[0]})"
        remedy = "set learner.backend=fsdp"
        raise ConfigError("learner.backend", config.learner.backend, rule, remedy) from error


def _state_of(
    models: Mapping[str, MegatronModel], copies: bool = False
) -> tuple[dict[str, Tensor], list[StepCounter]]:
    """(live tensors by flat names, torch's random state among them; counters of steps) of the models that change.
    copies: include copies of tied weights, which are loaded but not saved."""
    state: dict[str, Tensor] = {storage.RNG: torch.get_rng_state()}
    counters: list[StepCounter] = []
    for model_name, model in models.items():
        if not model.changes:
            continue
        shapes: dict[str, tuple[int, ...]] = {}
        pieces = defaultdict[str, list[tuple[Box, Tensor]]](list)
        for shard in model.shards():
            if shard.copy and not copies:
                continue
            counters += [shard.counter] if shard.counter is not None else []
            for cut, views in _cut(shard):
                if shard.counter is not None:
                    state[storage.flat_name(model_name, cut.name, "step")] = shard.counter.value
                for kind, view in views.items():
                    name = storage.flat_name(model_name, cut.name, kind)
                    shapes[name] = cut.shape
                    pieces[name].append((cut.box, view))
        state |= {name: storage.Boxes(shapes[name], found) for name, found in pieces.items()}
    return state, counters


def _cut(shard: Shard) -> Iterator[tuple[BoxShard, dict[str, Tensor]]]:
    """Each checkpoint box of a shard, with views of the shard's tensors."""
    stop = shard.start + len(shard.tensors[""])
    for cut in cuts(shard.parts, shard.shape, shard.start, stop):
        here = slice(cut.start - shard.start, cut.stop - shard.start)
        yield cut, {kind: flat[here].view(cut.box.shape) for kind, flat in shard.tensors.items()}


def _reader(model: ModelConfig, seed: int, key: str) -> Read:
    """A function that reads boxes of the checkpoint at `model.path`, and raises ConfigError as `Slices.read`."""
    slices = Slices.of(model.path, key)
    quantized = getattr(load_model_config(model, key), "quantization_config", None) is not None
    if slices is not None and not quantized:
        return slices.read
    causal_lm = load_causal_lm(model, seed, key=key)
    whole = {**checkpoint_tensors(causal_lm), **named_constants(causal_lm)}
    return lambda name, _, box: whole[name][box.slices()]


@torch.no_grad()
def _fill(tensors: Mapping[str, Tensor], parts_of: PartsOf, read: Read) -> None:
    """Fill a chunk's tensors. Padding rows of the vocabulary become 0."""
    for name, tensor in tensors.items():
        start = 0
        for part in parts_of(name):
            stop = start + part.box.shape[0]
            tensor[start:stop].copy_(read(part.name, part.shape, part.box))
            start = stop
        tensor[start:].zero_()
