"""The memory of a rank of vLLM: what its weights and the staging of new ones need, and what is left for its KV cache.

gpu_memory_share of a device   weights │ staging, buckets, checksum │ KV cache, activations
                               └─ vLLM's own ──┐   └─ reserved here     ┌── vLLM's own ─┘
                                               └─ gpu_memory_utilization┘
"""

from __future__ import annotations

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.models.adapters import adapter_shapes
from asyncrl.models.loading import checkpoint_shapes
from asyncrl.sync.layout.layout import ITEM_BYTES, Layout, whole_layout
from asyncrl.sync.layout.quantized import quantized_layout
from asyncrl.sync.plan.cost_model import ModelCost, PoolShape, generator_layout
from asyncrl.sync.tensors.budget import MemoryPart, generator_parts, stages_on_device, total


def rank_parts(
    config: Config, layout: Layout, learner_ranks: int, device_bytes: int | None = None
) -> list[MemoryPart]:
    """The memory of a rank that takes `layout`, its KV cache apart. device_bytes: of its device; None: unknown, so that
    sync.staging=auto counts as device. The checks of the configuration have seen to the rest."""
    sync, ours = config.sync, config.generator.vllm
    item_bytes = ITEM_BYTES[ours.dtype or config.model.dtype]
    layout = quantized_layout(layout, config.generator.quantization)
    sent = whole_layout(adapter_shapes(config.model)) if config.model.lora.travels else layout
    parts = generator_parts(layout, sent, item_bytes, sync, learner_ranks, on_device=True)
    if device_bytes is None:
        on_device = not sync.receives_on_host
    else:
        on_device = stages_on_device(sync, parts, granted_bytes(config, device_bytes))
    if on_device:
        return parts
    return generator_parts(layout, sent, item_bytes, sync, learner_ranks, on_device=False)


def granted_bytes(config: Config, device_bytes: int) -> int:
    """Bytes of a device that weights and staging may take, a KV cache of generator.vllm.kv_cache_mb apart."""
    ours = config.generator.vllm
    return int(ours.gpu_memory_share * device_bytes) - ((ours.kv_cache_mb or 0) << 20)


def check_rank_memory(config: Config, parts: list[MemoryPart], device_bytes: int) -> None:
    """Raises ConfigError if weights and staging leave nothing for a KV cache."""
    ours, granted = config.generator.vllm, granted_bytes(config, device_bytes)
    needs = ", ".join(f"{part.name} {part.bytes / 1e9:.2f} GB" for part in parts if part.bytes)
    staged = any(part.name == "staging" and part.bytes for part in parts)
    require(
        total(parts) < granted,
        "generator.vllm.gpu_memory_share",
        ours.gpu_memory_share,
        f"grants {granted / 1e9:.2f} GB of a device of {device_bytes / 1e9:.2f} GB, and a rank needs {needs}",
        "set sync.staging=host"
        if staged
        else f"set generator.vllm.tensor_parallel={2 * ours.tensor_parallel}",
    )


def share_of_vllm(config: Config, device_bytes: int) -> float:
    """The share of its device that vLLM may take: without what is reserved for staging. Raises ConfigError."""
    cost = ModelCost(*checkpoint_shapes(config.model))
    layouts = generator_layout(cost, PoolShape(tp=config.generator.vllm.tensor_parallel))
    parts = rank_parts(config, layouts.largest, config.learner.processes, device_bytes)
    check_rank_memory(config, parts, device_bytes)
    reserved = [part for part in parts if part.name != "weights"]
    return config.generator.vllm.gpu_memory_share - total(reserved) / device_bytes
