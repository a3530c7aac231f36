"""Runs whose learner spreads tokens or experts over two processes. A generator's weights and log-probs are compared
with the learner's all the time, and a difference stops the run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from processes import counts_of, ran, rows
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2MoeConfig

pytestmark = pytest.mark.slow


def test_two_processes_share_the_tokens_of_every_micro_batch(config_file: Path) -> None:
    run = trained(config_file, "learner.parallel.context=2")
    AutoModelForCausalLM.from_pretrained(run / "final")


def test_two_processes_share_the_experts(config_file: Path, model_folder: Path, tmp_path: Path) -> None:
    dense = AutoConfig.from_pretrained(model_folder)
    same = {key: getattr(dense, key) for key in ("vocab_size", "hidden_size", "eos_token_id", "pad_token_id")}
    mixture = Qwen2MoeConfig(
        **same,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        bos_token_id=None,
        architectures=["Qwen2MoeForCausalLM"],
    )
    folder = shutil.copytree(
        model_folder, tmp_path / "mixture", ignore=shutil.ignore_patterns("*.safetensors")
    )
    mixture.save_pretrained(folder)
    run = trained(config_file, "learner.parallel.expert=2", f"model.path={folder}")
    AutoModelForCausalLM.from_pretrained(run / "final")


def trained(config_file: Path, *words: str) -> Path:
    ran("asyncrl", "train", str(config_file), "learner.processes=2", *words)
    run = config_file.parent / "it"
    assert counts_of(run) == (4, 16, 0)
    assert [row["train/groups"] for row in rows(run) if "train/groups" in row] == [4] * 4
    return run
