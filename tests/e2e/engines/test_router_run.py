"""A whole run of a model with experts, whose learner sends tokens to the experts that the engine chose."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_functions import reward_key
from processes import counts_of, ran, rows
from transformers import AutoConfig

from asyncrl.tasks.addition import write_model_folder

pytestmark = pytest.mark.slow

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


def test_a_run_trains_on_recorded_experts(config_file: Path) -> None:
    model = config_file.parent / "experts"
    write_model_folder(model, hidden_size=64, layers=2)
    plain = AutoConfig.from_pretrained(model).to_dict()
    same = ("hidden_size", "num_attention_heads", "vocab_size", "eos_token_id", "pad_token_id")
    shape = {**{key: plain[key] for key in same}, "num_hidden_layers": 2, "num_key_value_heads": 2}
    AutoConfig.for_model("qwen3_moe", **shape, **EXPERTS, bos_token_id=None).save_pretrained(model)
    words = (f"model.path={model}", "model.router_replay=true", "evaluation.source=null", "run.versions=4")
    words += (
        reward_key("digit_sum"),
        "queue.max_staleness=0",
    )  # all tokens are those of the version that is trained
    ran("asyncrl", "train", str(config_file), *words)
    assert counts_of(config_file.parent / "it")[0] == 4
    told = rows(config_file.parent / "it")
    assert sum(row["train/logprob_gap/train/tokens"] for row in told) > 0
    assert max(row.get("train/logprob_gap/train/max", 0.0) for row in told) < 1e-4
