"""What the generator of the bench has to do: its models, and the configuration that both sides have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.tasks.addition import write_model_folder
from asyncrl.types import Task
from bench.qwen2 import write_qwen2

SIZES = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536}
TINY = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 192}
"""Heads of 32 numbers: vLLM runs none smaller on a CPU."""
DEMO_SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "eos_token_id": 31,
}


@dataclass(frozen=True, slots=True)
class Load:
    """Groups of `group` samples, `groups` of them a version, `slots` samples decoded at once.

    prompt         tokens of a prompt: one a letter
    mean, longest  tokens of an answer on average, and at most
    sizes          of the model, in place of those of `write_model`
    """

    slots: int
    group: int
    groups: int
    prompt: int
    mean: int
    longest: int
    sizes: Mapping[str, Any]


LOADS = {
    "long": Load(slots=32, group=4, groups=32, prompt=64, mean=64, longest=512, sizes=SIZES),
    "short": Load(slots=256, group=4, groups=64, prompt=6, mean=11, longest=12, sizes=DEMO_SIZES),
}
"""short: the demo's."""
LONG = LOADS["long"]

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
    """Random weights: of a token to end with, one in `vocab_size`, 8192 unless `sizes` has it."""
    write_model_folder(folder)
    others = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
        "max_position_embeddings": 2 * LONG.longest,
        "tie_word_embeddings": True,
        "eos_token_id": 8191,
    }
    write_qwen2(folder, **{**others, **sizes})


def config_of(folder: Path, engine: str, address: str = "tcp://127.0.0.1:*", load: Load = LONG) -> Config:
    path = folder / f"{engine}.yaml"
    length = load.longest + load.prompt
    text = CONFIG.format(folder=folder, engine=engine, address=address, length=length, **asdict(load))
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def task_at(ordinal: int, load: Load = LONG) -> Task:
    """Its prompt is a string of digits."""
    return Task(ordinal, f"{ordinal % 10**load.prompt:0{load.prompt}d}")


def tasks() -> list[dict[str, Any]]:
    """Never read: the bench feeds its queue itself. A configuration needs a source."""
    return []


def reward(task: Task, text: str) -> float:
    return float(task.ordinal % 2)
