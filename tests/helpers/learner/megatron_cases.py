"""Tiny models of every family that the Megatron backend supports, and what is done with a backend to compare it."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import TINY, random_group, small_config
from torch import Tensor

from asyncrl.config.schema import Config, LearnerConfig, ModelConfig
from asyncrl.config.sections.learner import OptimizerConfig, ParallelConfig
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.data.batch import MicroBatch

needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is built for Linux on x86-64 alone"
)

SHARED: dict[str, Any] = {**TINY, "num_hidden_layers": 4}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}
"""DeepSeek-V3 with everything that it may have."""

PLAIN: dict[str, Any] = {
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "rope_interleave": False,
    "rope_parameters": None,
}


def write_model(folder: Path, family: str) -> None:
    """A folder with config.json alone. One that is there already is left alone: ranks share it."""
    import transformers

    if (folder / "config.json").exists():
        return
    make: dict[str, tuple[str, dict[str, Any]]] = {
        "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
        "qwen2_five": ("Qwen2", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
        "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
        "llama": ("Llama", {"tie_word_embeddings": False}),
        "mistral": ("Mistral", {"sliding_window": 48}),
        "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        "qwen3_moe": (
            "Qwen3Moe",
            {**EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
        ),
        "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 24}),
        "deepseek_v3": ("DeepseekV3", LATENT),
        "deepseek_v3_plain": ("DeepseekV3", {**LATENT, **PLAIN}),
    }
    name, own = make[family]
    config = getattr(transformers, f"{name}Config")(**SHARED | own, architectures=[f"{name}ForCausalLM"])
    config.save_pretrained(folder)


def write_weights(folder: Path, family: str, **how: Any) -> None:
    """The same with weights, in as many files as `save_pretrained` is told to make."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model(folder, family)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer))
    model.save_pretrained(folder, **how)


def config_of(
    folder: Path,
    family: str,
    backend: str = "fsdp",
    dtype: str = "float32",
    activation_checkpointing: Any = "none",
    **parallel: Any,
) -> Config:
    """Of a run on that family's model, which lies in `folder`. Adam's ε is far above the noise of gradients that are 0
    in exact arithmetic, such as those of the biases of keys."""
    path = folder / family
    write_model(path, family)
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=1, grad_clip=20.0, eps=1e-2, weight_decay=0.1)
    learner = LearnerConfig(
        backend=backend,  # type: ignore[arg-type]
        micro_batch_tokens=64,
        activation_checkpointing=activation_checkpointing,
        optimizer=optimizer,
        parallel=ParallelConfig(**parallel),
    )
    return small_config(folder, model=ModelConfig(path=str(path), dtype=dtype), learner=learner)  # type: ignore[arg-type]


def batches(step: int) -> list[MicroBatch]:
    """Three of a step, of differing lengths; the second and third at another temperature, the third of rollouts with up
    to two segments."""
    made = [MicroBatch.of([random_group(10 * step + n, size=2 + n, segments=1 + n // 2)]) for n in range(3)]
    return [
        dataclasses.replace(batch, temperature_R=batch.temperature_R * (1.0 if n == 0 else 0.7))
        for n, batch in enumerate(made)
    ]


def own(every: list[MicroBatch], backend: Backend) -> list[MicroBatch]:
    """A data rank's share of the micro-batches, filled up with empty ones: every rank has equally many."""
    here = every[backend.data_rank :: backend.data_world]
    most = -(-len(every) // backend.data_world)
    return [*here, *[MicroBatch.empty()] * (most - len(here))]


def loss(batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor, *_: Tensor) -> Tensor:
    """Something that the first two outputs have a part in, each token another."""
    weight_N = torch.cos(batch.token_ids_N.float() + batch.position_ids_N)
    return (weight_N * (logp_N + 0.3 * entropy_N)).sum()


def train(backend: Backend, steps: range) -> list[float]:
    """The gradient's norm of each step, whose micro-batches come in two claims."""
    norms = []
    for step in steps:
        first, *rest = batches(step)
        for claim in ([first, first], rest):
            backend.policy.accumulate(own(claim, backend), loss)
        norm = backend.policy.gradient_norm(0.1)
        assert backend.policy.optimizer_step(0.1, lr=1e-2) == norm
        norms.append(norm)
    return norms


def says(backend: Backend) -> dict[str, Any]:
    """What a backend answers now, the same on every rank."""
    batch = batches(7)[1]
    return {"logp_N": backend.policy.predict(batch), "following_RV": backend.policy.predict_next(batch)}
