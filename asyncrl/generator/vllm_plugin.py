"""What vLLM calls in each of its processes where this package is installed: makes the weight transfer known by name.

    vllm serve MODEL --weight-transfer-config '{"backend": "asyncrl"}' \\
        --worker-extension-cls asyncrl.generator.vllm_worker.WeightsExtension
"""

from __future__ import annotations

BACKEND = "asyncrl"


def register() -> None:
    """Nothing of ours is imported before somebody asks for the backend."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, "asyncrl.generator.vllm_worker", "AsyncRLWeightTransfer")
