"""The same training on one process and on several: small models of several families, and what is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from learner_cases import TINY, random_group, small_config, tiny_model, without_counts
from torch import Tensor

from asyncrl.config.schema import Config, LearnerConfig, ModelConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.learner import OptimizerConfig, ParallelConfig
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.checks.logprob_check import probe_batch
from asyncrl.learner.training import requirements
from asyncrl.learner.training.version_step import version_step
from asyncrl.probes import prompts
from asyncrl.sync.layout.layout import ParamLayout

SIZES: dict[str, Any] = {**TINY, "num_experts_per_tok": 2}
FEW: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 16, "norm_topk_prob": True}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
MIXTURES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=4, sliding_window=None, architectures=["MixtralForCausalLM"]
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SIZES, **FEW, shared_expert_intermediate_size=32, architectures=["Qwen2MoeForCausalLM"]
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, **FEW, head_dim=8, architectures=["Qwen3MoeForCausalLM"]
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **(SIZES | LATENT),
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        architectures=["DeepseekV3ForCausalLM"],
    ),
}


@dataclass(frozen=True)
class Case:
    """family: of MIXTURES, or the dense model · critic: it learns beside the policy, from a whole batch"""

    parallel: ParallelConfig
    family: str = "dense"
    critic: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one rank says of two versions: metrics of each, its shards, and what may follow some prompts."""

    values: list[dict[str, float]]
    layout: dict[str, ParamLayout]
    tensors: dict[str, Tensor | list[Tensor]]
    following: Tensor


def make_models(folder: Path) -> None:
    tiny_model(folder / "dense")
    for name, config in MIXTURES.items():
        config().save_pretrained(folder / name)


def config_of(folder: Path, case: Case, alone: bool = False) -> Config:
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=1, grad_clip=0.5, eps=1e-3)
    return small_config(
        folder,
        model=ModelConfig(path=str(folder / case.family), dtype="float32"),
        learner=LearnerConfig(
            micro_batch_tokens=64,
            optimizer=optimizer,
            parallel=ParallelConfig() if alone else case.parallel,
        ),
        algorithm=AlgorithmConfig(advantage="gae" if case.critic else "grpo", proximal="frozen"),
    )


def trained(config: Config) -> tuple[FsdpBackend, Outcome]:
    """Two versions of three groups each, spread over the data ranks; of two the second has fewer, of four the last has
    none."""
    backend = FsdpBackend(config, requirements.models(config))
    step, values = version_step(backend, config), []
    for version in range(2):
        groups = [random_group(3 * version + i, version=version, segments=1 + i) for i in range(3)]
        mine = groups[backend.data_rank :: backend.data_world]
        for part in (mine, []):
            step.add(part, version)
        values.append(without_counts(step.step(version).values))
    tensors = {n: _copy(t) for n, t in backend.local_tensors().items()}
    following = backend.policy.predict_next(probe_batch(prompts(33, 5)))
    return backend, Outcome(values, dict(backend.layout()), tensors, following)


def put_together(outcomes: list[Outcome]) -> Mapping[str, Tensor]:
    """Whole parameters from all ranks' boxes; NaN where no rank has anything."""
    whole: dict[str, Tensor] = {}
    for outcome in outcomes:
        for name, param in outcome.layout.items():
            tensor = whole.setdefault(name, torch.full(param.shape, torch.nan))
            parts = outcome.tensors[name]
            for box, part in zip(param.boxes, parts if isinstance(parts, list) else [parts], strict=True):
                at = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True))
                tensor[at] = part
    return whole


def _copy(parts: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return parts.clone() if isinstance(parts, Tensor) else [part.clone() for part in parts]
