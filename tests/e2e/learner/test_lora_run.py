"""A run whose policy learns by adapters: generators get merged weights and compare log-probs with the learner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import finished, rows, started
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

REWARD = f"reward.function='{Path(__file__).parents[1].joinpath('own_functions.py')}:length'"


@pytest.mark.slow
def test_a_policy_with_adapters_and_a_reference_below_them(config_file: Path) -> None:
    run = config_file.parent / "it"
    words = ["model.lora.rank=4", "model.lora.targets=[q_proj,up_proj]", "algorithm.kl_loss.coef=0.1", REWARD]
    with started("asyncrl", "train", str(config_file), *words) as launcher:
        code, printed = finished(launcher)
    assert code == 0, printed
    told = rows(run)
    assert [row["version"] for row in told] == [1, 2, 3, 4]
    assert all(row["grad_norm"] > 0 for row in told)
    assert (
        max(row.get("logprob_gap/probe/max", 1.0) for row in told if row["logprob_gap/probe/tokens"]) < 1e-3
    )
    AutoModelForCausalLM.from_pretrained(run / "final")
    adapters = load_file(run / "final" / "adapter" / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in adapters.items() if ".lora_B." in name)
    assert json.loads((run / "summary.json").read_text())["weight_updates"] > 0
