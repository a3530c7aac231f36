"""The model of the bench, and the configuration that both sides have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.tasks.addition import write_model_folder
from asyncrl.types import Task
from bench.qwen2 import write_qwen2

SLOTS, GROUP, GROUPS = 32, 4, 32
"""Samples decoded at once, samples of a task, tasks of a version."""

LONGEST = 512
"""Tokens of the longest answer."""

PROMPT = 64
"""Tokens of a prompt: one a letter."""

SIZES = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536}
TINY = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 192}
"""Heads of 32 numbers: vLLM runs none smaller on a CPU."""

CONFIG = """
run: {{name: bench, dir: {folder}, versions: 1000000, seed: 3}}
model: {{path: {folder}/model}}
tasks: {{source: "bench.generator.model:tasks"}}
reward: {{function: "bench.generator.model:reward"}}
batch: {{groups: {groups}, group_size: {group}}}
generator: {{engine: {engine}, slots: {slots}, max_tokens: {longest}, max_length: {length}, threads: 1}}
queue: {{max_staleness: 4, store: memory, address: "{address}"}}
learner: {{threads: 1, micro_batch_tokens: 4096}}
"""


def write_model(folder: Path, sizes: Mapping[str, Any]) -> None:
    """Random weights: of a token to end with, one in 8192."""
    write_model_folder(folder)
    write_qwen2(
        folder,
        **sizes,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=8192,
        max_position_embeddings=2 * LONGEST,
        tie_word_embeddings=True,
        eos_token_id=8191,
    )


def config_of(folder: Path, engine: str, address: str = "tcp://127.0.0.1:*") -> Config:
    path = folder / f"{engine}.yaml"
    sizes: dict[str, Any] = {"groups": GROUPS, "group": GROUP, "slots": SLOTS, "longest": LONGEST}
    text = CONFIG.format(folder=folder, engine=engine, address=address, length=LONGEST + PROMPT, **sizes)
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def task_at(ordinal: int) -> Task:
    """Its prompt is a string of PROMPT digits."""
    return Task(ordinal, f"{ordinal:0{PROMPT}d}")


def tasks() -> list[dict[str, Any]]:
    """Never read: the bench feeds its queue itself. A configuration needs a source."""
    return []


def reward(task: Task, text: str) -> float:
    return float(task.ordinal % 2)
