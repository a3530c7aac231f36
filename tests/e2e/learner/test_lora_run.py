"""A run whose policy learns by adapters: generators get these alone, and compare log-probs with the learner."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_functions import LENGTH
from processes import ran, rows, summary_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@pytest.mark.slow
def test_a_policy_with_adapters_and_a_reference_below_them(config_file: Path) -> None:
    run = config_file.parent / "it"
    words = ["model.lora.rank=4", "model.lora.targets=[q_proj,up_proj]", "algorithm.kl_loss.coef=0.1", LENGTH]
    ran("asyncrl", "train", str(config_file), *words)
    told = rows(run)
    assert [row["version"] for row in told] == [1, 2, 3, 4]
    assert all(row["train/grad_norm"] > 0 for row in told)
    assert (
        max(
            row.get("train/logprob_gap/probe/max", 1.0)
            for row in told
            if row["train/logprob_gap/probe/tokens"]
        )
        < 1e-3
    )
    AutoModelForCausalLM.from_pretrained(run / "final")
    adapters = load_file(run / "final" / "adapter" / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in adapters.items() if ".lora_B." in name)
    assert summary_of(run)["weight_updates"] > 0
    sent = told[-1]["sync/bytes"] / told[-1]["sync/transfers"]  # the first version of a generator too
    assert sent == sum(tensor.nbytes for tensor in adapters.values())
