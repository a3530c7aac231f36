"""The memory of a run's ranks against their devices: a table of `asyncrl sync plan`, and a check before a start."""

from __future__ import annotations

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.generator.engines.vllm import vllm_memory
from asyncrl.models.adapters import adapter_shapes
from asyncrl.sync.plan.cost_model import ModelCost, PoolShape, generator_layout, learner_layout
from asyncrl.sync.tensors.budget import MemoryPart, learner_parts, total


def learner_memory(config: Config, model: ModelCost, learner: PoolShape, streams: int) -> list[MemoryPart]:
    """The parts of the learner rank that holds most. streams: generator ranks that it sends to at once."""
    layouts, sent = learner_layout(model, learner), learner_layout(sent_cost(config, model), learner)
    trained = config.model.lora.rank == 0 or config.model.lora.travels
    ranks = layouts.mesh.ranks
    return learner_parts(layouts.largest, sent.largest, trained, config.sync, ranks, streams)


def sent_cost(config: Config, model: ModelCost) -> ModelCost:
    """The cost of what a version has: the model, or adapters alone, each as a part that no tensor axis cuts."""
    lora = config.model.lora
    return ModelCost(adapter_shapes(config.model), model.heads) if lora.travels else model


def generator_memory(
    config: Config, model: ModelCost, pool: PoolShape, learner_ranks: int, device_bytes: int | None
) -> list[MemoryPart]:
    """The parts of the generator rank that takes most, its KV cache apart."""
    layout = generator_layout(model, pool).largest
    return vllm_memory.rank_parts(config, layout, learner_ranks, device_bytes)


def check_memory(
    config: Config, model: ModelCost, learner: PoolShape, generators: PoolShape, device_bytes: int
) -> None:
    """Raises ConfigError for a learner or for generators of vLLM that devices of this size cannot hold."""
    streams = generators.count * generators.tp
    parts = learner_memory(config, model, learner, streams)
    needs = ", ".join(f"{part.name} {part.bytes / 1e9:.2f} GB" for part in parts)
    rule = f"a rank needs {needs}, and a device has {device_bytes / 1e9:.2f} GB"
    remedy = "raise it, or set sync.snapshot_device=host"
    require(total(parts) < device_bytes, "learner.processes", config.learner.processes, rule, remedy)
    if config.generator.engine == "vllm":
        ranks = generator_memory(config, model, generators, config.learner.processes, device_bytes)
        vllm_memory.check_rank_memory(config, ranks, device_bytes)
