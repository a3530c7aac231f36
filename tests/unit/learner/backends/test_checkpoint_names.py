"""Names of a checkpoint's parameters against what transformers itself writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from asyncrl.config.schema import ModelConfig
from asyncrl.models.loading import checkpoint_shapes, checkpoint_tensors
from asyncrl.sync.layout.predicted_sharding import Heads

SMALL = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
}
CONFIGS = [
    Qwen2Config(**SMALL, tie_word_embeddings=True),
    Qwen3MoeConfig(**SMALL, num_experts=3, num_experts_per_tok=1, moe_intermediate_size=4),
    MixtralConfig(**SMALL, num_local_experts=3),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_views_are_what_transformers_saves(config: PretrainedConfig, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    saved, views = load_file(tmp_path / "model.safetensors"), checkpoint_tensors(model)
    assert views.keys() == saved.keys()
    assert all(torch.equal(views[name], saved[name]) for name in saved)
    shapes, heads = checkpoint_shapes(ModelConfig(str(tmp_path), "bfloat16"))
    assert shapes == {name: (tuple(tensor.shape), "bfloat16") for name, tensor in saved.items()}
    assert heads == Heads(query_rows=8, key_rows=4, key_heads=2)


def test_a_view_is_live() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[1])
    checkpoint_tensors(model)["model.layers.1.mlp.experts.2.up_proj.weight"].fill_(7.0)
    fused = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    assert (fused[2, 4:] == 7.0).all()
    assert (fused == 7.0).sum() == 4 * 8
