"""What vLLM computes of loaded weights is computed again at a flip; what no version has is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from missing import needs_vllm
from model_families import FAMILIES
from torch import nn
from transformers import DeepseekV3Config, Qwen3Config

from asyncrl.config.schema import Config, GeneratorConfig, ModelConfig
from asyncrl.errors import WeightSyncError
from asyncrl.generator.engines.vllm.vllm_derived import (
    AbsorbedMatrices,
    QuantizedProjections,
    check_constants,
)
from asyncrl.generator.engines.vllm.vllm_start import _kv_numbers, checkpoint_constants, engine_arguments

HEADS, LATENT, KEYS, VALUES = 2, 3, 4, 5
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


class StandIn(nn.Module):
    """An MLA layer of vLLM. copies: of its weights; else views of them."""

    is_amx_bmm_enabled = False

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(LATENT, HEADS * (KEYS + VALUES), bias=False).requires_grad_(False)
        self.dtype = torch.bfloat16 if copies else torch.float32
        for name, half in self.halves().items():
            self.register_parameter(name, nn.Parameter(half, requires_grad=False))

    def halves(self) -> dict[str, torch.Tensor]:
        heads = self.kv_b_proj.weight.data.to(self.dtype).view(HEADS, KEYS + VALUES, LATENT)
        keys, values = heads.split([KEYS, VALUES], dim=1)
        return {"W_UK_T": keys, "W_UV": values.transpose(1, 2)}

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        assert dtype == torch.bfloat16
        for name, half in self.halves().items():
            self.get_parameter(name).copy_(half)


@pytest.mark.parametrize("copies", [False, True])
def test_absorbed_matrices_follow_kv_b_proj_where_they_lie(copies: bool) -> None:
    layer = StandIn(copies)
    matrices, up, down = (
        AbsorbedMatrices(nn.ModuleDict({"attn": layer}), torch.bfloat16),
        layer.W_UV,
        layer.W_UK_T,
    )
    assert matrices.names == {"attn.W_UV", "attn.W_UK_T"}
    loaded = torch.arange(HEADS * (KEYS + VALUES) * LATENT).view(HEADS, KEYS + VALUES, LATENT)
    layer.kv_b_proj.weight.copy_(loaded.flatten(0, 1))
    matrices.absorb()
    assert torch.equal(down.float(), loaded[:, :KEYS].float())  # [heads, keys, latent]
    assert torch.equal(up.float(), loaded[:, KEYS:].transpose(1, 2).float())  # [heads, latent, values]


def test_a_matrix_that_vllm_makes_in_another_place_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = StandIn(copies=True)
    matrices = AbsorbedMatrices(nn.ModuleDict({"attn": layer}), torch.bfloat16)

    def anew(dtype: torch.dtype) -> None:
        layer.W_UV = nn.Parameter(layer.W_UV.clone(), requires_grad=False)

    monkeypatch.setattr(layer, "process_weights_after_loading", anew)
    with pytest.raises(WeightSyncError, match=r"attn\.W_UV"):
        matrices.absorb()


def test_a_form_that_cannot_be_followed_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "is_amx_bmm_enabled", True)
    with pytest.raises(WeightSyncError, match="attention_backend=CPU_MLA"):
        AbsorbedMatrices(nn.ModuleDict({"attn": StandIn(copies=True)}), torch.bfloat16)


@pytest.mark.parametrize(("family", "constants"), [("deepseek-v3", {BIAS}), ("qwen3", set())])
def test_an_engine_that_waits_for_the_learner_loads_what_nobody_sends(
    family: str, constants: set[str], tmp_path: Path
) -> None:
    FAMILIES[family].save_config(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    assert checkpoint_constants(model).keys() == constants
    (tmp_path / "model.safetensors").touch()
    arguments = engine_arguments(Config(model=model, generator=GeneratorConfig(engine="vllm")))
    assert arguments["load_format"] == ("auto" if constants else "dummy")
    assert arguments.get("attention_backend") == ("CPU_MLA" if family == "deepseek-v3" else None)


def test_a_constant_that_was_drawn_at_random_is_refused_by_name() -> None:
    check_constants([BIAS], "auto")
    check_constants([], "dummy")
    with pytest.raises(WeightSyncError, match=BIAS):
        check_constants([BIAS], "dummy")


def test_the_cache_of_a_token() -> None:
    """Keys and values of the rank's heads; with latent attention one vector and its rotary part, on every rank."""
    qwen = Qwen3Config(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    assert [_kv_numbers(qwen, ranks) for ranks in (1, 2)] == [3 * 2 * 32, 3 * 2 * 16]
    latent = DeepseekV3Config(num_hidden_layers=3, kv_lora_rank=512, qk_rope_head_dim=64)
    assert [_kv_numbers(latent, ranks) for ranks in (1, 2)] == [3 * 576, 3 * 576]


class QuantizedStandIn(nn.Module):
    """A projection of vLLM in int8, as it is when weights are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 4, dtype=torch.int8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.ones(6, 1), requires_grad=False)
        self.scheme = self

    def process_weights_after_loading(self, layer: QuantizedStandIn) -> None:
        """As for GPUs: a view of the same memory."""
        layer.weight = nn.Parameter(layer.weight.t(), requires_grad=False)


@needs_vllm
def test_a_flip_writes_to_the_matrices_that_a_gpu_multiplies_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    layer = QuantizedStandIn()
    layer.process_weights_after_loading(layer)
    projections = QuantizedProjections(nn.ModuleDict({"up": layer}), torch.bfloat16)
    coming = torch.arange(24, dtype=torch.int8).view(6, 4)
    projections.plain["up.weight"].copy_(coming)
    projections.pack()
    assert torch.equal(layer.weight, coming.t())
    assert projections.plain["up.weight"].is_contiguous()
    assert not projections.derived
