"""Does every algorithm learn? `asyncrl bench climb [PRESET …]`: each preset of `configs/algorithms` on a tiny task.

    sample (policy up to LAG versions old) ─▸ score ─▸ the learner's own step ─▸ weights, every LAG versions
      ▲                                                                             │
      └─────────────────────────────────────────────────────────────────────────────┘

Engine, rewards, models beside the policy and steps are those of a run; only queue and weight stream are left out, so
that a preset takes seconds, in one process, the same numbers every time. The policy starts from random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from asyncrl.config.load import CONFIGS, load_config
from asyncrl.config.schema import Config
from asyncrl.errors import TrainingError
from asyncrl.generator.engines.transformers.transformers_engine import load_transformers_engine
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.generator.scoring.scores import passes_filter
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.training import requirements
from asyncrl.learner.training.version_step import version_step
from asyncrl.models.prompts import policy_tokenizer
from asyncrl.offline.process import train_supervised
from asyncrl.tasks.addition import write_model_folder
from asyncrl.tasks.source import training_tasks
from asyncrl.types import Group, Task

LAG = 2
"""Versions between two updates of the engine: half of the tokens are a version old."""

EDGE = 5
"""Versions that the first and the last reward are the mean of."""

TOY: dict[str, Any] = {
    "batch": {"groups": 20, "group_size": 8},
    "generator": {"slots": 160},
    "learner": {"optimizer": {"lr": 1e-2, "warmup_steps": 2}},
    "critic": {"optimizer": {"lr": 1e-2, "warmup_steps": 2}},
    "reward_model": {"optimizer": {"lr": 1e-2, "warmup_steps": 2}},
    "run": {"versions": 60},
}
"""Settings that make the task small. A preset keeps its own."""

STEPWISE = {"reward": {"function": "asyncrl.tasks.echo:stepwise"}}
SEVERAL_STEPS = {"learner": {"optimizer": {"lr": 5e-3}}, "run": {"versions": 100}}
"""For four optimizer steps a version."""
CHANGES: dict[str, dict[str, Any]] = {
    # At first all are wrong in most groups, and it learns what they sampled: with 20 groups it ends at 0.73 to 0.93, by
    # seed.
    "asymre": {"batch": {"groups": 40}, "run": {"versions": 100}},
    # At a rate of 1e-2 a seed, or how a machine rounds, decides whether it stays at 0.67.
    "clip_cov": {"learner": {"optimizer": {"lr": 3e-3}}, "run": {"versions": 100}},
    "dapo": {
        "algorithm": {"shaping": {"overlong_buffer": 1, "overlong_penalty": 0.1}},
        "generator": {"max_tokens": 5},
    },
    "gigpo": STEPWISE,
    "hgpo": STEPWISE,
    "off_policy_step_baseline": STEPWISE,
    "kl_cov": SEVERAL_STEPS,
    # At a rate of 5e-3, or with 20 groups, how a machine rounds decides whether it stays at 0.5 or comes to 0.9.
    "pf_ppo": {
        "batch": {"groups": 40},
        "learner": {"optimizer": {"lr": 2e-3}},
        "run": {"versions": 100},
    },
    "ppo": SEVERAL_STEPS,
    "prime": {"reward_model": {"optimizer": {"lr": 1e-3}}},
    # After 60 versions it comes to 0.94 on one machine and 0.69 on another.
    "remax": {"batch": {"groups": 480, "group_size": 1}, "run": {"versions": 100}},
    "safe_rlhf": {
        "algorithm": {"cost_limit": 0.03, "advantage_scale": 3.0},
        "reward": {"function": "asyncrl.tasks.echo:with_cost"},
        # With 20 groups, a seed or how a machine rounds decides whether it stays at 0.53 or comes to 0.73; at a rate
        # of 5e-3, whether the cost has come back to its limit at the end.
        "batch": {"groups": 60},
        "learner": {"optimizer": {"lr": 3e-3}},
        "run": {"versions": 100},
    },
    "vapo": {
        "batch": {"groups": 40},
        "critic": {"warmup_versions": 20},
        "learner": {"epochs": 2, "optimizer": {"lr": 3e-3}},
        "run": {"versions": 80},
    },
}
"""Where a preset needs more than TOY to be itself on so small a task."""

BEST = {"safe_rlhf": 0.93}
"""The optimum where it is not 1: every digit but most of the nines."""

TEACHER_STEPS = 150
MOST_ROUNDS = 100
"""Rounds of other tasks in place of filtered groups, at most."""


@dataclass(frozen=True, slots=True)
class Climb:
    """The result of one preset. rewards: mean over the rollouts of each version; best: what the optimal policy gets."""

    preset: str
    best: float
    rewards: list[float]
    parts: dict[str, list[float]]
    seconds: float

    @property
    def start(self) -> float:
        return mean(self.rewards[:EDGE])

    @property
    def end(self) -> float:
        return mean(self.rewards[-EDGE:])


def presets() -> list[str]:
    return sorted(path.stem for path in (CONFIGS / "algorithms").glob("*.yaml"))


def climb(preset: str, folder: Path, overrides: Sequence[str] = (), enough: float = math.inf) -> Climb:
    """Train the preset on the echo task; models and configuration go to `folder`. overrides: "key=value" texts.

    enough: the share of the optimum with which it ends before its last version
    """
    if preset.startswith("distill"):
        overrides = [f"teacher.path={_teacher(folder)}", *overrides]
    config, best = toy_config(preset, folder, overrides), BEST.get(preset, 1.0)
    started = time.perf_counter()
    groups = asyncio.run(_loop(config, enough * best))
    rewards = [_reward(version) for version in groups]
    names = groups[0][0].reward_parts
    parts = {
        name: [mean(float(g.reward_parts[name].mean()) for g in version) for version in groups]
        for name in names
    }
    return Climb(preset, best, rewards, parts, time.perf_counter() - started)


def _reward(version: Sequence[Group]) -> float:
    return mean(float(group.rewards.mean()) for group in version)


def toy_config(preset: str, folder: Path, overrides: Sequence[str] = ()) -> Config:
    """The preset with the echo task, a random model in `folder` and TOY."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model_folder(folder / "model", hidden_size=32, layers=1)
    settings: dict[str, Any] = {"include": ["tasks/echo.yaml", f"algorithms/{preset}.yaml", "toy.yaml"]}
    (folder / "toy.yaml").write_text(yaml.safe_dump(TOY), encoding="utf-8")
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | CHANGES.get(preset, {})), encoding="utf-8")
    here = [f"model.path={folder / 'model'}", f"run.dir={folder}"]
    return load_config(folder / "config.yaml", [*here, *overrides])


def _teacher(folder: Path) -> Path:
    """A model that was shown the answers."""
    teacher = folder / "teacher"
    shown = [
        f"sft.output={teacher}",
        f"sft.steps={TEACHER_STEPS}",
        "sft.batch_size=10",
        "sft.optimizer.lr=1e-2",
    ]
    train_supervised(toy_config("grpo", folder, shown))
    return teacher


async def _loop(config: Config, enough: float) -> list[list[Group]]:
    """The groups of each version, until the last EDGE of them have the reward `enough`."""
    torch.manual_seed(config.run.seed)
    backend = FsdpBackend(config, requirements.models(config))
    way = version_step(backend, config)
    tokenizer = policy_tokenizer(config)
    engine, scorer = load_transformers_engine(config, tokenizer), Scorer.from_config(config.reward)
    rollouts = Rollouts(engine, tokenizer, scorer, config)
    tasks = training_tasks(config)
    await engine.start()
    every: list[list[Group]] = []
    ordinals = count()
    for version in range(config.run.versions):
        if version % LAG == 0:
            await engine.flip(backend.local_tensors(), version)
        every.append(await next_groups(config, rollouts, map(tasks.task_at, ordinals)))
        way.add(every[-1], version)
        if refused := way.step(version).refused:
            raise TrainingError(f"version {version}: {refused}")
        if len(every) >= EDGE and mean(map(_reward, every[-EDGE:])) >= enough:
            break
    await engine.close()
    scorer.close()
    backend.close()
    return every


async def next_groups(config: Config, rollouts: Rollouts, tasks: Iterator[Task]) -> list[Group]:
    """The groups of one version. Dropped ones are replaced, as by a worker."""
    kept: list[Group] = []
    for _ in range(MOST_ROUNDS):
        some = islice(tasks, config.batch.groups)
        made = await asyncio.gather(*(_group(rollouts, task) for task in some))
        kept += [group for group in made if passes_filter(group, config)]
        if len(kept) >= config.batch.groups:
            return kept[: config.batch.groups]
    raise TrainingError(f"nearly all groups are filtered: {len(kept)} left of {MOST_ROUNDS} rounds of tasks")


async def _group(rollouts: Rollouts, task: Task) -> Group:
    return await rollouts.score(task, await rollouts.sample(task, str(task.ordinal)))


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("asyncrl bench climb", description=__doc__)
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="names in configs/algorithms; none: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(words)
    climbs = []
    for preset in arguments.presets or presets():
        with tempfile.TemporaryDirectory() as folder:
            climbs.append(climb(preset, Path(folder), [f"run.seed={arguments.seed}"]))
        print(f"{preset}: {climbs[-1].start:.2f} -> {climbs[-1].end:.2f}", flush=True)
    _print(climbs)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(c) for c in climbs], indent=1) + "\n", encoding="utf-8")
    return 0


def _print(climbs: Sequence[Climb]) -> None:
    table = Table("preset", "reward at the start", "at the end", "optimum", "versions", "seconds")
    for c in climbs:
        table.add_row(
            c.preset,
            f"{c.start:.2f}",
            f"{c.end:.2f}",
            f"{c.best:.2f}",
            str(len(c.rewards)),
            f"{c.seconds:.1f}",
        )
    Console().print(table)
