"""The model that is trained, of random weights, and its configuration; rollouts as groups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.tasks.addition import write_model_folder
from asyncrl.types import NO_VERSION, Group, Rollout, Sampling, Task
from bench.learner.rollouts import LIKELY, VOCABULARY, Sample
from bench.qwen2 import write_qwen2

SIZES = {
    "hidden_size": 320,
    "num_hidden_layers": 8,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "intermediate_size": 864,
}
"""11M parameters."""

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
}

MICRO_BATCH_TOKENS = 2048
"""As many as a padded batch of eight short rollouts has: more at once do not fit the caches of a core."""

CONFIG = """
run: {{name: bench, dir: {folder}, versions: 1000000, seed: 3}}
model: {{path: {folder}/model, dtype: {dtype}}}
tasks: {{source: "bench.generator.model:tasks"}}
reward: {{function: "bench.generator.model:reward"}}
generator: {{engine: scripted, max_tokens: 2048, max_length: 4096}}
learner: {{micro_batch_tokens: {tokens}, optimizer: {{lr: 1.0e-6, warmup_steps: 0}}}}
"""
"""The scripted engine: the log-probs of these rollouts are made up, and nobody is to compare them."""


def write_model(folder: Path, sizes: Mapping[str, Any]) -> None:
    """Configuration and a tokenizer, which TRL asks for."""
    write_model_folder(folder)
    write_qwen2(
        folder,
        **sizes,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=2,
    )


def config_of(folder: Path, dtype: str = "float32", tokens: int = MICRO_BATCH_TOKENS) -> Config:
    path = folder / "learner.yaml"
    path.write_text(CONFIG.format(folder=folder, dtype=dtype, tokens=tokens), encoding="utf-8")
    return load_config(path)


def groups_of(samples: list[list[Sample]]) -> list[Group]:
    return [
        Group.from_rollouts(Task(ordinal, ""), Sampling(), [_rollout(sample) for sample in group])
        for ordinal, group in enumerate(samples)
    ]


def _rollout(sample: Sample) -> Rollout:
    mask = np.array([0] * len(sample.prompt) + [1] * len(sample.answer), np.int8)
    values: dict[str, Any] = {
        "token_ids": np.array([*sample.prompt, *sample.answer], np.int64),
        "loss_mask": mask,
        "logprobs": np.where(mask, LIKELY, 0).astype(np.float32),
        "versions": np.where(mask, 0, NO_VERSION).astype(np.int32),
    }
    return Rollout(**values, finish="stop", reward=sample.reward)
