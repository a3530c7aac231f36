"""How many versions each algorithm needs when all of its data have one age: the plot of the README.

    make demo && python -m bench.staleness --seeds 0 1 2 --json FILE --table FILE --plot docs/figures/staleness.svg

    policy of version v − age ─▸ groups ─▸ the learner's step of version v
      ▲                                       │
      └──────── copies of the last versions ──┘

The engine, the rewards and the learner's steps are those of a run. Queue and processes are left out, so that the age is
the same number for every token and a run repeats to the last bit, but for tasks with environments, whose turns come as
threads give them. The first `age` versions have data of version 0.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.bench.climb import next_groups
from asyncrl.config.load import load_config
from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.config.sections.tasks import MAIN
from asyncrl.errors import TrainingError
from asyncrl.generator.engines.transformers.transformers_engine import load_transformers_engine
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.reporting.heldout import of_group, scores
from asyncrl.learner.training import requirements
from asyncrl.learner.training.version_step import version_step
from asyncrl.models.prompts import policy_tokenizer
from asyncrl.sync.tensors.quantization import round_trip
from asyncrl.tasks.source import held_out, training_tasks
from asyncrl.types import Task
from bench.output import write_results

Ages = tuple[int, ...]
"""Of the data of a run. Where there are several, as many groups of each version have each of them."""

ARMS: dict[str, list[str]] = {
    "clip": ["algorithm.dual_clip=2"],
    "asymre": ["algorithm.dual_clip=2", "algorithm.advantage=asymre"],
    "off_policy_baseline": ["algorithm.dual_clip=2", "algorithm.advantage=off_policy_baseline"],
    "clip_int8": ["algorithm.dual_clip=2", "generator.quantization=int8"],
    "clip_fp8": ["algorithm.dual_clip=2", "generator.quantization=fp8"],
    "none": ["algorithm.loss=reinforce"],
    "tis": ["algorithm.loss=reinforce", "algorithm.proximal=frozen", "algorithm.correction.kind=tis"],
    "m2po": [
        *("algorithm.loss=reinforce", "algorithm.proximal=frozen", "algorithm.correction.kind=tis"),
        *("algorithm.correction.high=100.0", "algorithm.correction.reject=m2po"),
        "algorithm.correction.reject_high=0.04",
    ],
    "dppo_tv": ["algorithm.loss=dppo_tv"],
}
"""Changes to the demo. All have its learning rate."""

STEP_ARMS: dict[str, list[str]] = {
    "off_policy_step_baseline_clip": [
        *("algorithm.advantage=off_policy_step_baseline", "algorithm.loss=ppo"),
        *("algorithm.proximal=behaviour", "algorithm.gamma=0.95", "algorithm.dual_clip=2"),
    ],
    "off_policy_step_baseline_rollouts": [
        *("algorithm.advantage=off_policy_step_baseline", "algorithm.loss=ppo", "algorithm.proximal=frozen"),
        *("algorithm.gamma=0.95", "algorithm.dual_clip=2", "algorithm.correction.kind=tis"),
        *("algorithm.correction.level=sequence", "algorithm.correction.high=2.0"),
    ],
    "gigpo": [
        *("algorithm.advantage=gigpo", "algorithm.loss=ppo", "algorithm.proximal=behaviour"),
        *("algorithm.gamma=0.95", "algorithm.dual_clip=2"),
    ],
    "off_policy_step_baseline": [
        *("algorithm.advantage=off_policy_step_baseline", "algorithm.loss=decoupled_ppo"),
        *("algorithm.proximal=frozen", "algorithm.gamma=0.95", "algorithm.dual_clip=2"),
    ],
}
"""Changes to a recipe of several turns, such as Sokoban's."""

PLOTTED = {
    ("clip", 0): "#2b8a3e",
    ("none", 8): "#c92a2a",
    ("clip", 8): "#868e96",
    ("off_policy_baseline", 8): "#1864ab",
}
"""Arms and ages of the plot, with their colours."""

MEANS = {"staleness": "train/staleness/mean", "effective_sample_size": "train/effective_sample_size"}
"""Figures of a run: metrics of its versions. One in which all groups are flat may have no sample size."""


async def train(config: Config, ages: Ages, bar: float) -> dict[str, Any]:
    """Train until `bar` or the end of the run: curve [(version, held-out accuracy)], mean staleness, mean effective
    sample size, lengths of the rollouts trained on, seconds. Raises TrainingError for a step that the learner refuses.

    ages: as many groups of each version have each of these ages
    """
    torch.manual_seed(config.run.seed)
    backend = FsdpBackend(config, requirements.models(config))
    learner, tokenizer = version_step(backend, config), policy_tokenizer(config)
    engine, scorer = load_transformers_engine(config, tokenizer), Scorer.from_config(config.reward)
    rollouts = Rollouts(engine, tokenizer, scorer, config)
    tasks = map(training_tasks(config).task_at, count())
    part = _part(config, len(ages))
    kept: deque[Mapping[str, Tensor]] = deque(maxlen=max(ages) + 1)
    found: list[tuple[int, float]] = []
    reports: list[Mapping[str, float]] = []
    tokens: list[int] = []
    begun = time.perf_counter()
    await engine.start()
    try:
        for version in range(config.run.versions + 1):
            weights = {name: tensor.clone() for name, tensor in backend.local_tensors().items()}
            kept.append(round_trip(weights, config.generator.quantization))
            if version % config.evaluation.every == 0 or version == config.run.versions:
                await engine.flip(kept[-1], version)
                found.append((version, await _accuracy(rollouts, config, MAIN)))
                if found[-1][1] >= bar or version == config.run.versions:
                    others = config.evaluation.named_sets.keys() - {MAIN}
                    sets = {name: await _accuracy(rollouts, config, name) for name in sorted(others)}
                    break
            for age in ages:
                made = max(0, version - age)
                await engine.flip(kept[made - version - 1], made)
                groups = await next_groups(part, rollouts, tasks)
                learner.add(groups, version)
                tokens += [int(one.loss_mask.sum()) for group in groups for one in group.rollouts()]
            report = learner.step(version)
            if report.refused:
                raise TrainingError(f"version {version}: {report.refused}")
            reports.append(report.values)
    finally:
        await engine.close()
        scorer.close()
        backend.close()
    means = {name: _mean(r[key] for r in reports if key in r) for name, key in MEANS.items()}
    return {
        "curve": found,
        "sets": sets,
        "lengths": lengths(tokens),
        "seconds": time.perf_counter() - begun,
        **means,
    }


def _part(config: Config, parts: int) -> Config:
    """With the groups of one of so many equal parts of a version."""
    groups, rest = divmod(config.batch.groups, parts)
    require(not rest, "batch.groups", config.batch.groups, f"has no {parts} equal parts", "give other ages")
    return dataclasses.replace(config, batch=dataclasses.replace(config.batch, groups=groups))


def lengths(tokens: Sequence[int]) -> dict[str, float]:
    """Of rollouts with so many tokens of the policy: median, 95th percentile, maximum, and the share of all tokens
    that is in the longest twentieth of them.

    >>> lengths([1] * 20 + [80])
    {'median': 1.0, 'p95': 1.0, 'max': 80.0, 'in_longest_20th': 0.8}
    """
    if not tokens:
        return {}
    ordered = np.sort(tokens)
    longest = ordered[-max(1, len(ordered) // 20) :]
    return {
        "median": float(np.median(ordered)),
        "p95": float(np.quantile(ordered, 0.95)),
        "max": float(ordered[-1]),
        "in_longest_20th": float(longest.sum() / ordered.sum()),
    }


async def _accuracy(rollouts: Rollouts, config: Config, name: str) -> float:
    exam = await rollouts.evaluate(Task(0, "", {}), held_out(config)[name], "held-out", name)
    chosen = config.evaluation.named_sets[name]
    return float(scores(*of_group(exam, chosen.samples), chosen.pass_reward)["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/recipes/demo.yaml")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of all runs")
    parser.add_argument("--model", default="runs/addition/warm", help="warm-started model folder")
    mixed = "0+16: half of the groups of each version have age 0, half age 16"
    parser.add_argument("--ages", type=_ages, nargs="+", default=[(0,), (8,), (16,)], help=mixed)
    parser.add_argument(
        "--arms", nargs="+", choices=[*ARMS, *STEP_ARMS], default=["clip", "off_policy_baseline"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--bar", type=float, default=0.96, help="accuracy at which a run ends")
    parser.add_argument("--processes", type=int, default=2, help="runs at once, of one thread each")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    runs = [(args, arm, ages, seed) for seed in args.seeds for ages in args.ages for arm in args.arms]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        args.processes, context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        results = list(pool.map(_run, *zip(*runs, strict=True)))
    found = {"figures": figures(results, args.bar), "runs": results}
    write_results(args.json, found, args.table, table(results, args.bar))
    if args.plot:
        draw(results, args.plot)


def _ages(text: str) -> Ages:
    """
    >>> _ages("0+16")
    (0, 16)
    """
    return tuple(map(int, text.split("+")))


def _run(args: argparse.Namespace, arm: str, ages: Ages, seed: int) -> dict[str, Any]:
    """One run, in a process of its own."""
    overrides = [f"run.seed={seed}", f"model.path={args.model}", *args.set, *(ARMS | STEP_ARMS)[arm]]
    found = asyncio.run(train(load_config(args.config, overrides), ages, args.bar))
    age = ages[0] if len(ages) == 1 else "+".join(map(str, ages))
    result = {"arm": arm, "age": age, "seed": seed, **found}
    print(json.dumps(result), flush=True)
    return result


def figures(runs: Sequence[dict[str, Any]], bar: float) -> dict[str, Any]:
    """By arm and age: the version of each seed that came to the bar, None for one that did not; the last accuracies."""
    found: dict[str, Any] = {}
    for run in runs:
        name = f"{run['arm']}.{run['age']}"
        version, accuracy = run["curve"][-1]
        found.setdefault(f"versions_to_bar.{name}", []).append(version if accuracy >= bar else None)
        found.setdefault(f"accuracy_end.{name}", []).append(accuracy)
    for name in [name for name in found if name.startswith("accuracy_end.")]:
        found[name] = statistics.median(found[name])
    return found


def table(runs: Sequence[dict[str, Any]], bar: float) -> str:
    """A row for each age and arm."""
    looks = min(len(run["curve"]) for run in runs)
    until = runs[0]["curve"][looks - 1][0]
    lines = [
        f"| age | arm | versions to {bar:.0%}, by seed | accuracy at the end | mean accuracy up to version {until} "
        "| s, evaluations too |",
        "|--:|---|---|--:|--:|--:|",
    ]
    rows = {(_ages(str(run["age"])), run["age"], run["arm"]) for run in runs}
    for _, age, arm in sorted(rows):
        some = [run for run in runs if (run["age"], run["arm"]) == (age, arm)]
        reached = (run["curve"][-1] for run in some)
        versions = ", ".join(str(version) if accuracy >= bar else "never" for version, accuracy in reached)
        end = statistics.median(run["curve"][-1][1] for run in some)
        early = _mean(accuracy for run in some for _, accuracy in run["curve"][:looks])
        seconds = statistics.median(run["seconds"] for run in some)
        lines.append(f"| {age} | `{arm}` | {versions} | {end:.3f} | {early:.3f} | {seconds:.0f} |")
    return "\n".join([*lines, ""])


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """The curves of those runs that are in PLOTTED, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 3.6))
    for (arm, age), colour in PLOTTED.items():
        label: str | None = "fresh data" if age == 0 else f"{age} versions old: {arm}"
        for run in runs:
            if (run["arm"], run["age"]) == (arm, age):
                versions, accuracy = zip(*run["curve"], strict=True)
                axes.plot(versions, accuracy, color=colour, alpha=0.85, linewidth=1.4, label=label)
                label = None
    axes.set(xlabel="version", ylabel="held-out accuracy", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _mean(values: Iterable[float]) -> float:
    """0 of nothing."""
    every = list(values)
    return statistics.mean(every) if every else 0.0


if __name__ == "__main__":
    main()
