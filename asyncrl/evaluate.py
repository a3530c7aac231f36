"""Held-out scores and answers of a model in this process: `asyncrl eval`, `asyncrl generate`, SFT's yardstick.

The engine, the sampling and the reward are those of a generator, so a score here and a score during a run are
the same number for the same weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.config.tasks import MAIN, EvaluationSet
from asyncrl.errors import ConfigError
from asyncrl.generator.rewards import Scorer
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.transformers_engine import load_transformers_engine
from asyncrl.learner.heldout import of_group, scores
from asyncrl.models import load_tokenizer
from asyncrl.tasks.source import held_out
from asyncrl.types import Group, Task


class Evaluator:
    """One embedded engine behind blocking calls. A context manager."""

    def __init__(self, config: Config) -> None:
        self._tasks = held_out(config)
        tokenizer = load_tokenizer(config.model)
        self._engine = load_transformers_engine(config, tokenizer)
        self._scorer = Scorer.from_config(config.reward)
        self._rollouts = Rollouts(self._engine, tokenizer, self._scorer, config)
        self._loop = asyncio.Runner()

    def __enter__(self) -> Self:
        self._loop.run(self._engine.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._engine.close())
        self._scorer.close()
        self._loop.close()

    @property
    def tasks(self) -> dict[str, int]:
        """Number of held-out tasks of each set."""
        return {name: len(tasks) for name, tasks in self._tasks.items()}

    def held_out(self, weights: Mapping[str, Tensor] | None = None, name: str = MAIN) -> Group:
        """The rollouts of each held-out task of a set, greedy unless `evaluation` says otherwise; with `weights`
        (checkpoint names, whole tensors) loaded first."""
        if weights is not None:
            self._loop.run(self._engine.flip(weights, self._engine.version + 1))
        exam = Task(0, "", {})
        return self._loop.run(self._rollouts.evaluate(exam, self._tasks[name], f"held-out/{name}", name))

    def answers(self, prompts: Sequence[str]) -> list[str]:
        """The text that the model makes of each prompt."""
        tasks = [Task(ordinal, prompt, {}) for ordinal, prompt in enumerate(prompts)]
        return self._loop.run(self._answers(tasks))

    async def _answers(self, tasks: Sequence[Task]) -> list[str]:
        return await asyncio.gather(*(self._rollouts.answer(t, f"prompt-{t.ordinal}") for t in tasks))


def run(config: Config, model_path: str) -> dict[str, Any]:
    """`asyncrl eval`: accuracy is the mean reward, tokens_mean the output tokens of an answer, the rest as in
    `learner/heldout.py`; of `evaluation.sets` the same under sets/<name>."""
    sets = config.evaluation.named_sets
    if not sets:
        raise ConfigError(
            "evaluation.source", None, "names no held-out tasks", "set it as tasks.source is set"
        )
    with Evaluator(_with_model(config, model_path)) as evaluator:
        results = {name: _result(evaluator, name, chosen) for name, chosen in sets.items()}
    others = {name: result for name, result in results.items() if name != MAIN}
    return {"model": model_path, **results.get(MAIN, {}), **({"sets": others} if others else {})}


def _result(evaluator: Evaluator, name: str, chosen: EvaluationSet) -> dict[str, Any]:
    group = evaluator.held_out(name=name)
    return {
        "tasks": evaluator.tasks[name],
        **scores(*of_group(group, chosen.samples), chosen.pass_reward),
        "tokens_mean": float(group.loss_mask.sum() / len(group.rewards)),
    }


def generate(config: Config, model_path: str, prompts: Sequence[str]) -> list[str]:
    """`asyncrl generate`: one answer per prompt, sampled as in training."""
    with Evaluator(_with_model(config, model_path)) as evaluator:
        return evaluator.answers(prompts)


def _with_model(config: Config, model_path: str) -> Config:
    return replace(config, model=replace(config.model, path=model_path))
