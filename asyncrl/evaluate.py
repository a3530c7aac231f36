"""Held-out scores and answers of a model: `asyncrl eval`, `asyncrl generate`, SFT's yardstick.

The engine, the sampling, the frame of a prompt and the reward are those of a generator, so a score here and a score
during a run are the same number for the same weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.config.sections.models import LoraConfig
from asyncrl.config.sections.tasks import MAIN, EvaluationSet, SourceConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.engines.engine import Engine, Sampler, SampleRequest
from asyncrl.generator.engines.transformers.transformers_engine import (
    TransformersEngine,
    load_transformers_engine,
)
from asyncrl.generator.process import load_engine
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.learner import checkpoint
from asyncrl.learner.reporting.heldout import of_group, scores
from asyncrl.models.prompts import policy_tokenizer
from asyncrl.tasks.datasets.rows import framed
from asyncrl.tasks.source import held_out
from asyncrl.telemetry.bars import tracked_work
from asyncrl.types import Group, Task, Turn

Result = TypeVar("Result")
LoadEngine = Callable[[Config, PreTrainedTokenizerBase], Engine]


class Evaluator:
    """One engine behind blocking calls, the embedded one unless given. A context manager. shows: progress on stderr."""

    def __init__(
        self, config: Config, load: LoadEngine = load_transformers_engine, shows: bool = False
    ) -> None:
        self._config, self._tasks = config, held_out(config)
        tokenizer = policy_tokenizer(config)
        self._engine = load(config, tokenizer)
        self._scorer = Scorer.from_config(config.reward)
        self._scorer.start()
        self._shows, self._sampler = shows, _CountingSampler(self._engine)
        self._rollouts = Rollouts(self._sampler, tokenizer, self._scorer, config)
        self._loop = asyncio.Runner()

    def __enter__(self) -> Self:
        self._loop.run(self._engine.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._rollouts.close())
        self._loop.run(self._engine.close())
        self._scorer.close()
        self._loop.close()

    @property
    def tasks(self) -> dict[str, int]:
        """Number of held-out tasks of each set."""
        return {name: len(tasks) for name, tasks in self._tasks.items()}

    def held_out(self, weights: Mapping[str, Tensor] | None = None, name: str = MAIN) -> Group:
        """The rollouts of each held-out task of a set, greedy unless `evaluation` sets a temperature; with `weights`
        (checkpoint names, whole tensors) loaded first, which the embedded engine takes."""
        if weights is not None:
            engine = cast(TransformersEngine, self._engine)
            self._loop.run(engine.flip(weights, self._engine.version + 1))
        exam = Task(0, "", {})
        made = self._rollouts.evaluate(exam, self._tasks[name], f"held-out/{name}", name)
        samples = self._config.evaluation.named_sets[name].samples * len(self._tasks[name])
        return self._loop.run(self._shown(made, samples))

    def answers(self, prompts: Sequence[str]) -> list[str]:
        """The text that the model makes of each prompt, framed as those of `tasks` are. Raises ConfigError where these
        differ in that."""
        source = _frame(self._config)
        tasks = [Task(ordinal, framed(prompt, source), {}) for ordinal, prompt in enumerate(prompts)]
        return self._loop.run(self._shown(self._answers(tasks), len(tasks)))

    async def _answers(self, tasks: Sequence[Task]) -> list[str]:
        return await asyncio.gather(*(self._rollouts.answer(t, f"prompt-{t.ordinal}") for t in tasks))

    async def _shown(self, work: Coroutine[Any, Any, Result], samples: int) -> Result:
        """samples: that the work takes, where each is one request."""
        if not self._shows:
            return await work
        turns = self._config.agent.several_turns
        made, before = ("turns" if turns else "answers"), self._sampler.done
        return await tracked_work(work, made, lambda: self._sampler.done - before, None if turns else samples)


class _CountingSampler:
    """done: samples that were made."""

    def __init__(self, engine: Sampler) -> None:
        self._engine, self.done = engine, 0

    async def sample(self, request: SampleRequest) -> list[Turn]:
        made = await self._engine.sample(request)
        self.done += request.n
        return made


def evaluate(config: Config, model_path: str) -> dict[str, Any]:
    """`asyncrl eval`: accuracy is the mean reward, tokens_mean the output tokens of an answer, the rest as in
    `learner/reporting/heldout.py`; of `evaluation.sets` the same under sets/<name>."""
    sets = config.evaluation.named_sets
    if not sets:
        raise ConfigError(
            "evaluation.source", None, "names no held-out tasks", "set it as tasks.source is set"
        )
    with Evaluator(_with_model(config, model_path), _load_engine, shows=True) as evaluator:
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
    with Evaluator(_with_model(config, model_path), _load_engine, shows=True) as evaluator:
        return evaluator.answers(prompts)


def _with_model(config: Config, model_path: str) -> Config:
    saved = Path(model_path)
    require(
        not checkpoint.is_one(saved),
        "--model",
        model_path,
        "is a checkpoint of a run, to go on from, and not a model",
        f"make one of it: asyncrl export {saved.parent.parent} --version {saved.name.lstrip('v0') or 0} DIR",
    )
    return replace(config, model=replace(config.model, path=model_path))


def _load_engine(config: Config, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """The engine of the run's generators, with the weights of model.path. Raises ConfigError for one with others."""
    ours = config.generator
    rule = "gets its weights from a learner, and there is none here"
    remedy = "score with one of the project's: generator.own_engine=null"
    require(ours.own_engine is None, "generator.own_engine", ours.own_engine, rule, remedy)
    rule = "uses a server, which has weights of its own and not those of --model"
    remedy = "set generator.engine=vllm or transformers, and generator.server.urls=[]"
    require(not ours.behind_http, "generator.engine", ours.engine, rule, remedy)
    # An export has its adapters merged, and is not quantized.
    whole = replace(config.model, lora=LoraConfig())
    as_saved = replace(config, model=whole, generator=replace(ours, quantization=None))
    return load_engine(as_saved, tokenizer, "the evaluator", load_weights=True)


def _frame(config: Config) -> SourceConfig:
    """The framing of prompts of `tasks`."""
    sources: list[SourceConfig] = [*config.tasks.sources.values()] or [config.tasks]
    require(
        len({(source.system, source.chat) for source in sources}) == 1,
        "tasks.mixture",
        list(config.tasks.mixture),
        "frames the prompts of its sources in different ways (system, chat): which is meant is not said",
        "give a configuration with one of these sources in tasks",
    )
    return sources[0]
