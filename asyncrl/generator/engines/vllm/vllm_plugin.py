"""What vLLM calls in each of its processes where this package is installed. It makes the weight transfer known by name:

    vllm serve MODEL --weight-transfer-config '{"backend": "asyncrl"}' \\
        --worker-extension-cls asyncrl.generator.engines.vllm.vllm_worker.WeightsExtension

and the engine core able to forget prefixes while requests are under way, which vLLM does only once there are none.
"""

from __future__ import annotations

from typing import Any

BACKEND = "asyncrl"

FORGET_PREFIXES = "asyncrl_forget_prefixes"
"""The name of `forget_prefixes` in the engine core."""


def register() -> None:
    """Nothing of ours is imported before somebody asks for the backend."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, FORGET_PREFIXES, forget_prefixes)
    if BACKEND not in Factory._registry:
        Factory.register_engine(
            BACKEND, "asyncrl.generator.engines.vllm.vllm_worker", "AsyncRLWeightTransfer"
        )


def forget_prefixes(core: Any) -> None:
    """No request that has yet to begin finds keys and values of before; those that have begun keep theirs.

    core: vLLM's EngineCore.
    """
    manager = core.scheduler.kv_cache_manager
    known = {block.block_id for block in manager.block_pool.blocks if block.block_hash is not None}
    manager.evict_blocks(known)
