"""Tasks of the package reasoning-gym: a hundred kinds of generated puzzles with scorers of their own.

    tasks:
      source: asyncrl.tasks.reasoning_gym:tasks
      options: {datasets: {chain_sum: 2, leg_counting: 1}}
      system: Think step by step and give the final answer between <answer> and </answer>.
    evaluation:
      source: asyncrl.tasks.reasoning_gym:heldout
      options: {datasets: [chain_sum, leg_counting], size: 200}
    reward:
      function: asyncrl.tasks.reasoning_gym:reward

It needs the extra `reasoning-gym`. Puzzles of isomorphic_strings, polynomial_multiplication and ransom_note depend on
PYTHONHASHSEED: set it if a run is to be repeated exactly.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.system.packages import imported
from asyncrl.types import Scored, Task

HELD_OUT_SEED = 1_000_000_000

Datasets = Mapping[str, float] | Sequence[str]
Configs = Mapping[str, Mapping[str, Any]]

ENTRY = "metadata"
"""The field of `task.data` for the scorer: a Python literal, which keeps tuples, and numbers as keys."""


def tasks(
    datasets: Datasets, seed: int = 0, size: int = 1_000_000, configs: Configs | None = None
) -> GymRows:
    """Rows {prompt, answer, metadata} of these data sets, in proportion to their weights.

    Args:
        datasets: names with weights, or names.
        seed: row i of seed s is mostly row i − 1 of seed s + 1, so different tasks need seeds that are `size` apart.
        size: rows of an epoch.
        configs: settings of data sets by name, e.g. {"chain_sum": {"min_terms": 2}}.

    Raises:
        ConfigError: reasoning-gym does not have a data set, or refuses its settings.
    """
    weights = dict(datasets) if isinstance(datasets, Mapping) else dict.fromkeys(datasets, 1.0)
    gym = _gym()
    from reasoning_gym.composite import DatasetSpec

    known = gym.factory.DATASETS
    for name in [*weights, *(configs or {})]:
        if name not in known or name not in weights:
            rule = f"{name} is none of " + (
                "reasoning-gym's data sets" if name in weights else "the datasets"
            )
            raise ConfigError("options.datasets", list(weights), rule, "see reasoning_gym.factory.DATASETS")
    specs = [
        DatasetSpec(name, weight, dict((configs or {}).get(name, {}))) for name, weight in weights.items()
    ]
    try:
        return GymRows(gym.create_dataset("composite", seed=seed, size=size, datasets=specs))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError("options.configs", configs, str(error), "see the data set's config class") from None


def heldout(
    datasets: Datasets, seed: int = HELD_OUT_SEED, size: int = 500, configs: Configs | None = None
) -> GymRows:
    """As `tasks`, with different rows (unless a data set has so few that they repeat)."""
    return tasks(datasets, seed, size, configs)


class GymRows:
    """A `reasoning_gym` data set as rows with a length."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = self._made[index]
        return {
            "prompt": entry["question"],
            "answer": None if entry["answer"] is None else str(entry["answer"]),
            ENTRY: repr(_plain(entry["metadata"])),
        }


def reward(task: Task, text: str) -> Scored:
    """The score, 0 to 1, of the text's last <answer>…</answer> by the data set's own scorer; 0 without one."""
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(text)
    metadata = ast.literal_eval(task.data[ENTRY])
    # The question is the last message.
    question = task.prompt if isinstance(task.prompt, str) else task.prompt[-1]["content"]
    entry = {"question": question, "answer": task.data["answer"], ENTRY: metadata}
    score = _scorer(metadata["source_dataset"])(answer, entry) if answer is not None else 0.0
    return Scored(float(score), answer=answer)


@cache
def _scorer(name: str) -> Any:
    return _gym().get_score_answer_fn(name)


def _gym() -> Any:
    package = "reasoning-gym"
    return imported("reasoning_gym", package, "tasks.source", f"{__name__}:tasks", package)


def _plain(value: Any) -> Any:
    """The value without numpy's types, so that `repr` writes a literal."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {_plain(key): _plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(_plain, value))
    return value
