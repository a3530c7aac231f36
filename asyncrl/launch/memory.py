"""The memory of a run's ranks against their devices: tables of `asyncrl config` and `asyncrl sync plan`, and a check
before a start."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from rich.table import Table

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.config.sections.generator import errors_of_pool, key_of_pool
from asyncrl.config.sections.models import LoraConfig
from asyncrl.config.sections.placement import REWARDS
from asyncrl.generator.engines.vllm import vllm_memory
from asyncrl.learner.models.lora import is_base
from asyncrl.learner.models.networks import blueprint
from asyncrl.learner.training import requirements
from asyncrl.models.adapters import adapter_shapes
from asyncrl.models.loading import checkpoint_shapes
from asyncrl.sync.layout.layout import ITEM_BYTES, Layout, whole_layout
from asyncrl.sync.layout.quantized import quantized_layout
from asyncrl.sync.plan.cost_model import ModelCost, PoolShape, generator_layout, learner_layout
from asyncrl.sync.tensors.budget import MemoryPart, learner_parts, total

LARGEST = 3
"""Parts of a rank's memory that the table of `asyncrl config` names."""


def learner_pool(config: Config) -> PoolShape:
    """`learner.processes` on the axes of `learner.parallel`. Contexts and stages count as shards: their processes send
    as much, if not the same. So do Megatron's data ranks, which have copies: each sends a part."""
    parallel = config.learner.parallel
    shards = max(1, config.learner.processes // (parallel.replicate * parallel.tensor))
    return PoolShape(replicate=parallel.replicate, fsdp=shards, tp=parallel.tensor, ep=parallel.expert)


def generator_pool(config: Config) -> PoolShape:
    """The generators of the configuration; a replica counts as one, because its ranks take versions by themselves."""
    ours = config.generator.vllm
    if config.generator.engine != "vllm":
        return PoolShape(count=config.generator.count)
    return PoolShape(count=config.generator.count * ours.data_parallel, tp=ours.tensor_parallel)


def learner_memory(config: Config, model: ModelCost, learner: PoolShape, streams: int) -> list[MemoryPart]:
    """The parts of the learner rank that holds most. streams: generator ranks that it sends to at once."""
    layouts, sent = learner_layout(model, learner), learner_layout(sent_cost(config, model), learner)
    trained = config.model.lora.rank == 0 or config.model.lora.travels
    ranks = layouts.mesh.ranks
    parts = learner_parts(layouts.largest, sent.largest, trained, config.sync, ranks, streams)
    if config.learner.backend == "megatron" and config.learner.own_backend is None:
        return [
            *_megatron_parts(config, model, layouts.largest),
            *parts[2 if config.model.lora.rank == 0 else 1 :],
        ]
    return parts


def _megatron_parts(config: Config, model: ModelCost, shard: Layout) -> list[MemoryPart]:
    """Weights of a Megatron rank and, unless adapters are trained, the state of their training. Data ranks and contexts
    have copies of weights and gradients, in float32; only masters and moments are sharded over all ranks.

    shard: one rank's part of all
    """
    parallel = config.learner.parallel
    cut = parallel.pipeline * parallel.tensor
    of_experts = parallel.pipeline * max(parallel.expert, parallel.tensor)
    held = {
        name: math.ceil(math.prod(shape) / (of_experts if ".experts." in name else cut))
        for name, (shape, _) in model.shapes.items()
    }
    weights = sum(held[name] * ITEM_BYTES[dtype] for name, (_, dtype) in model.shapes.items())
    frees = "learner.parallel.tensor, pipeline, expert: more ranks that share it"
    parts = [MemoryPart("weights", weights, frees)]
    if config.model.lora.rank == 0:
        masters_and_moments = sum(p.elements * (12 if ITEM_BYTES[p.dtype] < 4 else 8) for p in shard.values())
        state = 4 * sum(held.values()) + masters_and_moments
        parts.append(MemoryPart("masters, gradients, Adam", state, frees))
    return parts


def sent_cost(config: Config, model: ModelCost) -> ModelCost:
    """The cost of what a version has: the model, with projections in 8 bits if they are quantized, or adapters alone,
    each as a part that no tensor axis cuts."""
    if config.model.lora.travels:
        return ModelCost(adapter_shapes(config.model), model.heads)
    sent = quantized_layout(whole_layout(model.shapes), config.generator.quantization)
    return ModelCost({name: (param.shape, param.dtype) for name, param in sent.items()}, model.heads)


def generator_memory(
    config: Config, model: ModelCost, pool: PoolShape, learner_ranks: int, device_bytes: int | None
) -> list[MemoryPart]:
    """The parts of the generator rank that takes most, its KV cache apart."""
    layout = generator_layout(model, pool).largest
    return vllm_memory.rank_parts(config, layout, learner_ranks, device_bytes)


def check_memory(config: Config, model: ModelCost, learner: PoolShape, device_bytes: int) -> None:
    """Raises ConfigError for a learner or for generators of vLLM that devices of this size cannot hold."""
    pools = {name: generator_pool(config.of_pool(name)) for name in config.generator_pools}
    parts = learner_memory(config, model, learner, _streams(pools.values()))
    needs = ", ".join(f"{part.name} {part.bytes / 1e9:.2f} GB" for part in parts)
    rule = f"a rank needs {needs}, and a device has {device_bytes / 1e9:.2f} GB"
    remedy = "raise it, or set sync.snapshot_device=host"
    require(total(parts) < device_bytes, "learner.processes", config.learner.processes, rule, remedy)
    for name, pool in pools.items():
        generator = (of_pool := config.of_pool(name)).generator
        if generator.engine == "vllm" and generator.devices != "":
            ranks = generator_memory(of_pool, model, pool, config.learner.processes, device_bytes)
            with errors_of_pool(name):
                vllm_memory.check_rank_memory(of_pool, ranks, device_bytes)


def _streams(generators: Iterable[PoolShape]) -> int:
    """Generator ranks that the learner sends to."""
    return sum(pool.count * pool.tp for pool in generators)


# ---- the table of `asyncrl config`


class PlacedPool(NamedTuple):
    """Processes with the same part in a run.

    ranks    "8", or "2 × 4" where each of two processes has four
    devices  CUDA_VISIBLE_DEVICES of all of them; None: as the shell has it
    memory   of one rank, without activations; empty where no model is known
    """

    name: str
    ranks: str
    devices: str | None
    memory: list[MemoryPart]


def placed_pools(config: Config) -> Iterator[PlacedPool]:
    """The pools of a run that have devices. Only config.json of each model is read. Raises ConfigError as
    `checkpoint_shapes`."""
    cost, learner = ModelCost(*checkpoint_shapes(config.model)), config.learner
    generators = {name: config.of_pool(name) for name in config.generator_pools}
    pools = {name: generator_pool(of_pool) for name, of_pool in generators.items()}
    parts = learner_memory(config, cost, learner_pool(config), _streams(pools.values()))
    beside = [_model_part(name, config, learner_pool(config)) for name in sorted(_held_by_learner(config))]
    yield PlacedPool("learner", str(learner.processes), learner.devices, [*parts, *beside])
    for name, of_pool in generators.items():
        ours, pool = of_pool.generator, pools[name]
        ranks = f"{pool.count}" if pool.tp == 1 else f"{pool.count} × {pool.tp}"
        memory = [] if ours.behind_http else generator_memory(of_pool, cost, pool, learner.processes, None)
        yield PlacedPool(key_of_pool(name), ranks, ours.devices, memory)
    for name, place in config.placement.pools.items():
        ranks = f"{place.processes}" if place.ranks == 1 else f"{place.processes} × {place.ranks}"
        memory = [] if name == REWARDS else [_model_part(name, config, PoolShape(fsdp=place.ranks))]
        yield PlacedPool(config.placement.key_of(name), ranks, place.devices, memory)


def placement_table(pools: Iterable[PlacedPool]) -> Table:
    table = Table(
        "pool",
        "ranks",
        "devices",
        "memory of a rank",
        "its largest parts",
        title="Placement",
        title_justify="left",
        box=None,
    )
    for name, ranks, devices, memory in pools:
        largest = sorted((part for part in memory if part.bytes), key=lambda part: -part.bytes)[:LARGEST]
        parts = ", ".join(f"{part.name} {of_bytes(part.bytes)}" for part in largest)
        seen = "as the shell has it" if devices is None else devices or "none"
        table.add_row(name, ranks, seen, of_bytes(total(memory)) if memory else "unknown", parts)
    return table


def of_bytes(count: float) -> str:
    """In powers of 1000, with three digits.

    >>> [of_bytes(count) for count in (0, 999, 12_340, 1.5e12)]
    ['0 B', '999 B', '12.3 kB', '1.5 TB']
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _held_by_learner(config: Config) -> set[str]:
    """The models beside the policy that have memory of their own in the learner's processes."""
    return {name for name in requirements.colocated(config) if not is_base(name, config)}


def _model_part(name: str, config: Config, pool: PoolShape) -> MemoryPart:
    """A model beside the policy: its weights, with the state of its training if it learns, over the ranks of `pool`."""
    plan = blueprint(name, config)
    model = replace(config.model, path=plan.path, lora=LoraConfig())
    layout = learner_layout(ModelCost(*checkpoint_shapes(model)), pool).largest.values()
    state = 16 if plan.optimizer is not None else 0
    return MemoryPart(name, sum(param.bytes + state * param.elements for param in layout))
