"""A recipe for GPUs, so small that a CPU trains it: the same file, with other words.

model      one of the same type, tiny, with random weights
hf:NAME    the folder of that name that `hub_rows` writes
sizes      two groups of two answers of a few tokens, two versions, one generator, one rank
reward     the recipe's, and the length as a second part: random answers would all earn 0
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from model_families import FAMILIES
from transformers import AutoConfig

from asyncrl.config.load import CONFIGS
from asyncrl.config.recipes import RecipeHead, recipe_heads
from asyncrl.config.schema import Config
from asyncrl.tasks.datasets.rows import HUB
from asyncrl.tasks.pictures import write_viewer
from asyncrl.tasks.tiny_model import save_tokenizer, text_shape

BIG = {
    str(head.path.relative_to(CONFIGS / "recipes")): head for head in recipe_heads() if "sync" in head.says
}
"""The recipes for GPUs."""

OWN_FUNCTIONS = Path(__file__).parents[2] / "e2e" / "own_functions.py"

LONGEST = 4096
"""Tokens of a prompt with its answer."""

SIZES = {
    "run.name": "tiny",
    "run.versions": 2,
    "batch.groups": 2,
    "generator.engine": "transformers",
    "generator.count": 1,
    "generator.slots": 8,
    "generator.max_tokens": 6,
    "generator.max_length": LONGEST,
    "generator.threads": 1,
    "generator.devices": None,
    "agent.max_turns": 2,
    "agent.max_tokens": None,
    "agent.environment_processes": 0,
    "tasks.max_prompt_tokens": None,
    "model.dtype": "float32",
    "model.image_pixels": None,
    "learner.backend": "fsdp",
    "learner.processes": 1,
    "learner.devices": None,
    "learner.gpu_memory_share": 1.0,
    "learner.offload": "none",
    "learner.threads": 1,
    "learner.micro_batch_tokens": 2 * LONGEST,
    "learner.optimizer.warmup_steps": 0,
    "critic.warmup_versions": 0,
    "checkpoint.every": 1000,
    "launch.quiet": True,
}
AXES = ("tensor", "context", "expert", "pipeline", "replicate")


def planned_model(head: RecipeHead) -> Path:
    """The folder below configs/models with the shapes of the recipe's model."""
    words = shlex.split(head.says["sync"])
    return CONFIGS.parent / words[words.index("--model") + 1]


def words_of(config: Config, model: Path, hub: Path) -> list[str]:
    """The words that shrink a recipe. model: a folder · hub: of `write_hub`"""
    values: dict[str, Any] = {**SIZES, "run.dir": str(hub.parent), "model.path": str(model)}
    values |= {f"learner.parallel.{axis}": 1 for axis in AXES}
    values["batch.group_size"] = min(2, config.batch.group_size)
    values["learner.mini_batches"] = min(2, config.learner.mini_batches)
    if config.algorithm.shaping.overlong_buffer:
        values["algorithm.shaping.overlong_buffer"] = 2
    if config.evaluation.source is not None:
        values |= {"evaluation.samples": 1, "evaluation.max_tokens": 4}
        if "count" in config.evaluation.options:
            values["evaluation.options.count"] = 2
        if "reasoning_gym" in config.evaluation.source:
            values["evaluation.options.size"] = 2
    for name in config.evaluation.sets:
        values |= {f"evaluation.sets.{name}.samples": 2, f"evaluation.sets.{name}.max_tokens": 4}
    if config.reward.function is not None:
        values["reward.function"] = None
        values["reward.functions.recipe"] = {
            "function": config.reward.function,
            "options": dict(config.reward.options),
        }
        values["reward.options"] = None
    values["reward.functions.length"] = {"function": f"{OWN_FUNCTIONS}:length"}
    values |= {key: str(hub / name.removeprefix(HUB)) for key, name in hub_names(config)}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def hub_names(config: Config) -> Iterator[tuple[str, str]]:
    """(key, 'hf:NAME')"""
    for section in ("tasks", "evaluation"):
        chosen = getattr(config, section)
        tree = {"source": chosen.source, "options": chosen.options}
        yield from _texts(tree | {name: getattr(chosen, name, {}) for name in ("mixture", "sets")}, section)


def _texts(tree: Mapping[str, Any], at: str) -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _texts(value, f"{at}.{name}")
        elif isinstance(value, str) and value.startswith(HUB):
            yield f"{at}.{name}", value


def write_tiny(kind: str, folder: Path) -> None:
    """A model of transformers' type `kind`, with a tokenizer that knows all of ASCII."""
    texts = ["Answer: 12. Think step by step, and find the number x.", "put your final answer within boxed"]
    if kind == "qwen2_5_vl":
        write_viewer(folder, texts, 2, family=kind)
        return
    tokenizer = save_tokenizer(folder, texts)
    shape = text_shape(tokenizer, layers=2, max_length=LONGEST)
    more = next((family.more for family in FAMILIES.values() if family.type == kind), {})
    if "qk_rope_head_dim" in more:  # latent attention has several
        del shape["head_dim"]
    AutoConfig.for_model(kind, **(shape | more)).save_pretrained(folder)
