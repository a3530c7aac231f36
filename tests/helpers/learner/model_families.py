"""Families of models, tiny and random, made from their config alone: what suites about all of them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedModel

from asyncrl.config.schema import ModelConfig
from asyncrl.models.loading import checkpoint_names, load_causal_lm
from asyncrl.types import NO_VERSION, Rollout

VOCABULARY, WINDOW, TOKENS, IMAGE = 37, 5, [3, 4, 11, 12, 17], 0
"""TOKENS: lengths of the rollouts; some fit into a sliding window, some do not. IMAGE: the token of images."""

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Far from uniform: what a family does to its scores and logits must be seen.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
SPARSE = {"num_local_experts": 4, "num_experts_per_tok": 2}
GLM = {
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "use_qk_norm": True,
}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}


ROPE_3D = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}


@dataclass(frozen=True)
class Family:
    """vision: of a model for images."""

    type: str
    more: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] | None = None

    def save_config(self, folder: Path) -> None:
        text = {**COMMON, **self.more}
        if self.vision is not None:
            text = {"text_config": text, "vision_config": self.vision, "image_token_id": IMAGE}
        AutoConfig.for_model(self.type, **text).save_pretrained(folder)


FAMILIES = {
    "qwen2": Family("qwen2"),
    "qwen2-tied-window": Family(
        "qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "qwen3": Family("qwen3", {"head_dim": 8}),
    "qwen2-moe": Family("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3-moe": Family("qwen3_moe", dict(EXPERTS, head_dim=8)),
    "llama": Family("llama"),
    "mistral": Family("mistral", {"sliding_window": WINDOW}),
    "mixtral": Family("mixtral", SPARSE),
    "gemma2": Family(
        "gemma2",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gemma3": Family(
        "gemma3_text",
        {"head_dim": 8, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "deepseek-v2": Family("deepseek_v2", dict(LATENT, topk_method="group_limited_greedy")),
    "deepseek-v3": Family("deepseek_v3", LATENT),
    "glm4-moe": Family("glm4_moe", GLM),
    "minimax-m2": Family("minimax_m2", {**SPARSE, "head_dim": 8, "rotary_dim": 4}),
    "smollm3": Family("smollm3", {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2}),
    "olmo3": Family(
        "olmo3", {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
    ),
    "gpt-oss": Family(
        "gpt_oss",
        {
            **SPARSE,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3-next": Family("qwen3_next", {**EXPERTS, **DELTA, "head_dim": 8}),
    "qwen3.5": Family("qwen3_5_text", {**DELTA, "head_dim": 8}),
    "qwen3.5-images": Family("qwen3_5", {**DELTA, "head_dim": 8}, VISION),
    "qwen3.5-moe": Family("qwen3_5_moe_text", {**EXPERTS, **DELTA, "head_dim": 8}),
    "qwen2.5-vl": Family("qwen2_5_vl", {"rope_parameters": ROPE_3D}, VISION),
    "qwen3-vl": Family("qwen3_vl", {"head_dim": 8, "rope_parameters": ROPE_3D}, VISION),
}


RELATIVES = {"glm4-moe", "minimax-m2", "smollm3", "olmo3", "qwen3.5", "qwen3.5-images", "qwen3.5-moe"}
"""Families whose layers are those of another one: their tests are slow ones."""

EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name in RELATIVES)) for name in FAMILIES]


def save_family(name: str, folder: Path) -> None:
    """Config and weights."""
    FAMILIES[name].save_config(folder)
    model = load_causal_lm(ModelConfig(path=str(folder)), seed=5)
    for number, buffer in enumerate(constants(model).values()):
        buffer.copy_(torch.linspace(-number, 1, buffer.numel()).reshape(buffer.shape))
    model.save_pretrained(folder)


def constants(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What its checkpoint has, by its names there, and nobody trains: DeepSeek-V3's biases of routers."""
    kept, names = model.state_dict().keys(), checkpoint_names(model.config)
    return {names.there(name): buffer for name, buffer in model.named_buffers() if name in kept}


def names_in(folder: Path) -> set[str]:
    """The parameters in a folder's files of weights."""
    return {name for path in folder.glob("*.safetensors") for name in load_file(path)}


def rollouts(lengths: Sequence[int] = TOKENS) -> list[Rollout]:
    """Random tokens, of which the first two are a prompt, the same in all."""
    random = np.random.default_rng(3)
    made = []
    for length in lengths:
        mask = np.array([0, 0] + [1] * (length - 2), np.int8)
        made.append(
            Rollout(
                token_ids=np.concatenate([[7, 9], random.integers(1, VOCABULARY, length - 2)]),
                loss_mask=mask,
                logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
                versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
                finish="stop",
                reward=0.0,
            )
        )
    return made
