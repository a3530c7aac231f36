"""The memory of a run's ranks against their devices: a table of `asyncrl sync plan`, and a check before a start."""

from __future__ import annotations

import math

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.config.sections.generator import errors_of_pool
from asyncrl.generator.engines.vllm import vllm_memory
from asyncrl.models.adapters import adapter_shapes
from asyncrl.sync.layout.layout import ITEM_BYTES, Layout, whole_layout
from asyncrl.sync.layout.quantized import quantized_layout
from asyncrl.sync.plan.cost_model import ModelCost, PoolShape, generator_layout, learner_layout
from asyncrl.sync.tensors.budget import MemoryPart, learner_parts, total


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
            *megatron_parts(config, model, layouts.largest),
            *parts[2 if config.model.lora.rank == 0 else 1 :],
        ]
    return parts


def megatron_parts(config: Config, model: ModelCost, shard: Layout) -> list[MemoryPart]:
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
    streams = sum(pool.count * pool.tp for pool in pools.values())
    parts = learner_memory(config, model, learner, streams)
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
