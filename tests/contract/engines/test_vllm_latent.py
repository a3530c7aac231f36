"""Latent attention (MLA) in real vLLM on the CPU: the matrices that it makes of the weights follow each update, and
what nobody trains is as in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import (
    CLOSE,
    SIZES,
    from_config,
    in_flight_at_an_update,
    log_probs,
    nudged,
    request,
    update,
    vllm_config,
    weights_of,
    with_weights,
)
from missing import needs_vllm
from transformers import DeepseekV2Config, DeepseekV3Config, PreTrainedModel

from asyncrl.config.sections.generator import VllmConfig
from asyncrl.generator.engines.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), needs_vllm]

# vLLM's kernel for CPUs has one width of latent vectors, and its rotary kernel is right with scaled frequencies alone.
LATENT = {
    **{name: size for name, size in SIZES.items() if name not in ("head_dim", "num_key_value_heads")},
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


def v3_with_biases(folder: Path) -> PreTrainedModel:
    """The biases of its router decide between experts."""
    routing = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "q_lora_rank": 24}
    model = from_config(DeepseekV3Config(**LATENT, **routing), folder)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    biases[0].copy_(torch.linspace(-0.5, 0.5, 8))
    model.save_pretrained(folder)
    return model


async def test_views_follow_an_update_and_biases_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = v3_with_biases(tmp_path)
    engine = VllmEngine(vllm_config(tmp_path), "generator-0", ())
    await engine.start()
    try:
        weights = nudged(weights_of(model), 1)
        await update(engine, weights)
        with_weights(model, weights)
        for turn in await engine.sample(request("a", n=3, max_tokens=40, prompt=40)):
            np.testing.assert_allclose(turn.logprobs, log_probs(model, turn), **CLOSE)
        await in_flight_at_an_update(engine, model, nudged(weights, 2), "keep", CLOSE["atol"])
    finally:
        await engine.close()


async def test_copies_follow_an_update_on_both_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with quantized weights, of which vLLM makes no views. Its processes are forked from this one."""
    from vllm.model_executor.layers.attention import mla_attention

    split = mla_attention.split_kv_b_proj

    def copied(*args: Any) -> Any:
        return tuple(half.clone() for half in split(*args))

    monkeypatch.setattr(mla_attention, "split_kv_b_proj", copied)
    model = from_config(DeepseekV2Config(**LATENT, q_lora_rank=None), tmp_path)
    config = vllm_config(tmp_path, vllm=VllmConfig(tensor_parallel=2))
    engine = VllmEngine(config, "generator-0", (), load_weights=True)
    await engine.start()
    try:
        weights = weights_of(model)
        for seed in (1, 2):
            weights = nudged(weights, seed)
            await update(engine, weights)
            with_weights(model, weights)
            for turn in await engine.sample(request("a", n=3, max_tokens=40, prompt=40)):
                np.testing.assert_allclose(turn.logprobs, log_probs(model, turn), **CLOSE)
    finally:
        await engine.close()
