"""Measure how busy each pool is, and what overlapping them is worth: `asyncrl bench utilization CONFIG`.

The same tasks, seeds and devices are run in four modes (`modes`) as real processes, all modes once in each
repetition, every other repetition in reverse order. For each mode, over all repetitions: throughput, the share of the
time that each pool works and each *named* wait, staleness, and the time until a reward is reached; beside them the
throughput that the measured stage times allow:

    one phase at a time    rollouts of a version / (G + L)
    overlapping            rollouts of a version / max(G, L)

G and L are the seconds of work of a generator and of the learner per version, measured in the same mode
(colocated) or in `sync_split`, where the pools do not disturb each other.

The first versions of a run, in which everything starts, are left out. A mode counts as faster than another one only if
every run was measured for --seconds without them and the 95 % interval over the repetitions has no 1 in it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console

from asyncrl.bench.report import Length, Ratio, draw, print_report, shortest, verdict
from asyncrl.config.load import load_config
from asyncrl.config.rules import at_least
from asyncrl.config.schema import Config
from asyncrl.config.sections.placement import COLOCATED
from asyncrl.launch.local_run import train
from asyncrl.system.cores import cores
from asyncrl.telemetry.sinks import read_rows
from asyncrl.telemetry.spans import OTHER, WAIT, busy_share
from asyncrl.twin.calibrate import check_one_kind

LEAST_ASYNC_STALENESS = 2
WARM_UP_VERSIONS = 3
RIVALS = ("sync_split", "sync_colocated")
"""Modes that `async` is compared with."""

VLLM_SHARE, LEARNER_SHARE = 0.45, 0.5
"""Shares of a GPU that both pools use at once; the rest is for CUDA itself."""

REWARD_VERSIONS = 5
"""A reward counts as reached when its mean over this many versions is."""

Row = Mapping[str, Any]
Runs = Sequence[Sequence[Row]]
"""The rows of one mode by repetition, a version each."""


@dataclass(frozen=True, slots=True)
class Mode:
    """overlaps: whether generation and training run at the same time, which decides the bound."""

    name: str
    overrides: tuple[str, ...]
    overlaps: bool


def modes(config: Config) -> list[Mode]:
    """The ways to share devices between generation and training, in the order of the table. Speed is compared, not
    bits: no fixed shapes at max_staleness 0.

    sync_split       each pool on its own devices, one phase at a time (max_staleness 0)
    sync_colocated   every device given to each phase in turn (docs/colocation.md): the fair rival
    one_step         pools overlap, data is at most one version old
    async            pools overlap, up to the config's own max_staleness (at least 2)
    """
    freely = max(LEAST_ASYNC_STALENESS, config.queue.max_staleness)
    synchronous = (*_staleness(0), "generator.fixed_shape=false")
    return [
        Mode("sync_split", (*synchronous, *_own_threads(config)), overlaps=False),
        Mode("sync_colocated", (*synchronous, *_everything_to_both(config)), overlaps=False),
        Mode("one_step", (*_staleness(1), *_own_threads(config)), overlaps=True),
        Mode("async", (*_staleness(freely), *_own_threads(config)), overlaps=True),
    ]


def _staleness(bound: int) -> tuple[str, ...]:
    return (f"queue.max_staleness={bound}", "queue.window=null", "queue.depth=null")


def _own_threads(config: Config) -> tuple[str, ...]:
    share = max(1, cores() // (config.generator.count + config.learner.processes))
    return (
        f"generator.threads={config.generator.threads or share}",
        f"learner.threads={config.learner.threads or share}",
    )


def _everything_to_both(config: Config) -> tuple[str, ...]:
    """On GPUs both pools get the union of the devices, on the CPU all cores: as many engines as have `tensor_parallel`
    devices each, and as many ranks as the learner's axes divide. They take turns if engine and backend can, else each
    has half of a GPU's memory."""
    turns = [f"{key}={value}" for key, value in COLOCATED.items()] if _take_turns(config) else []
    pools = (config.generator.devices, config.learner.devices)
    devices = dict.fromkeys(one.strip() for pool in pools if pool for one in pool.split(","))
    if devices:
        on_vllm = config.generator.on_vllm
        of_an_engine = config.generator.vllm.tensor_parallel if on_vllm else 1
        of_a_copy = config.learner.parallel.processes
        return (
            f"generator.devices='{','.join(devices)}'",
            f"learner.devices='{','.join(devices)}'",
            f"generator.count={max(1, len(devices) // of_an_engine)}",
            f"learner.processes={max(1, len(devices) // of_a_copy) * of_a_copy}",
            *(_half_the_memory() if on_vllm and not turns else ()),
            *turns,
        )
    return (
        *turns,
        f"generator.threads={max(1, cores() // config.generator.count)}",
        f"learner.threads={max(1, cores() // config.learner.processes)}",
    )


def _take_turns(config: Config) -> bool:
    generator, learner = config.generator, config.learner
    own = generator.own_engine is not None or learner.own_backend is not None
    return not own and generator.engine in ("transformers", "vllm") and learner.backend == "fsdp"


def _half_the_memory() -> tuple[str, ...]:
    return (f"generator.vllm.gpu_memory_share={VLLM_SHARE}", f"learner.gpu_memory_share={LEARNER_SHARE}")


def main(words: Sequence[str]) -> int:
    arguments = _parser().parse_intermixed_args(words)
    base = load_config(arguments.config, arguments.overrides)
    check_one_kind(base)
    rows: dict[str, list[Sequence[Row]]] = {mode.name: [] for mode in modes(base)}
    for repetition, mode in schedule(modes(base), arguments.repetitions):
        print(f"repetition {repetition + 1} of {arguments.repetitions}, {mode.name}", flush=True)
        rows[mode.name].append(_run(arguments, base, mode))
    report = summarise(rows, modes(base), reward=arguments.reward, least_s=arguments.seconds)
    print_report(report, Console())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        draw(report, arguments.plot)
    return 0


def schedule(ways: Sequence[Mode], repetitions: int) -> list[tuple[int, Mode]]:
    """(repetition, mode) in the order of the runs. A machine that grows slower or faster favours no mode."""
    return [
        (repetition, mode)
        for repetition in range(repetitions)
        for mode in (reversed(ways) if repetition % 2 else ways)
    ]


def summarise(
    rows: Mapping[str, Runs], ways: Sequence[Mode], reward: float | None, least_s: float
) -> dict[str, Any]:
    """{"figures": {name: value}, "claims": {name: sentence}, "modes": {mode: details}}.

    reward: the mean reward that is timed; None: the highest that every run has reached
    least_s: seconds that each run must have without its first versions for a claim
    """
    every = [steps for runs in rows.values() for steps in runs]
    best = (max(_rewards(steps), default=0.0) for steps in every)
    target = min(best) if reward is None else reward
    details = {way.name: _measure(rows[way.name], target) for way in ways}
    alone = details["sync_split"]
    for way in ways:
        stages = details[way.name] if way.name == "sync_colocated" else alone
        generate, learn = stages["generator_work_s"], stages["learner_work_s"]
        seconds = max(generate, learn) if way.overlaps else generate + learn
        details[way.name]["bound_rollouts_per_s"] = (
            stages["rollouts_a_version"] / seconds if seconds else None
        )
    ratios = {rival: Ratio.of(_rates(rows["async"]), _rates(rows[rival])) for rival in RIVALS}
    length = shortest({name: [_length(steps) for steps in runs] for name, runs in rows.items()})
    claims = {f"async_over_{rival}": verdict(ratio, length, least_s) for rival, ratio in ratios.items()}
    return {"figures": _figures(details, ratios, target), "claims": claims, "modes": details}


def _run(arguments: argparse.Namespace, base: Config, mode: Mode) -> list[Row]:
    folder = Path(arguments.dir) / f"{base.run.name}-{mode.name}"
    return short_run(arguments.config, arguments.overrides, folder, arguments.versions, mode.overrides)


def short_run(
    path: str, overrides: Sequence[str], folder: Path, versions: int, changes: Sequence[str]
) -> list[Row]:
    """Train a configuration anew in `folder`, without evaluations. Returns the rows of its versions.

    overrides: the user's · changes: made to them, the last ones
    """
    shutil.rmtree(folder, ignore_errors=True)
    words = [
        *(f"run.dir={folder.parent}", f"run.name={folder.name}", f"run.versions={versions}"),
        *("run.resume=false", "run.target_accuracy=null", "evaluation.source=null"),
        f"checkpoint.every={versions}",
    ]
    train(load_config(path, [*overrides, *words, *changes]))
    return [row for row in read_rows(folder / "metrics.jsonl") if "perf/step_s" in row]


def _steady(steps: Sequence[Row]) -> Sequence[Row]:
    """Without the first versions, in which everything starts; all of them if there are no others."""
    return steps[WARM_UP_VERSIONS:] or steps


def _length(steps: Sequence[Row]) -> Length:
    steady = _steady(steps)
    return Length(len(steady), sum(row["perf/step_s"] for row in steady), len(steps) - len(steady))


def _rates(runs: Runs) -> list[float]:
    """Rollouts a second of each repetition."""
    steady = map(_steady, runs)
    return [
        sum(row["train/rollouts"] for row in rows) / sum(row["perf/step_s"] for row in rows)
        for rows in steady
    ]


def _measure(runs: Runs, target: float) -> dict[str, Any]:
    """One mode, over all of its repetitions."""
    steady = [row for steps in runs for row in _steady(steps)]
    times = [_seconds_to(steps, target) for steps in runs]
    seconds = sum(row["perf/step_s"] for row in steady)
    learner = _spans_a_version(steady, "perf/time/")
    generator = _spans_a_version(steady, "perf/generator/time/")
    return {
        "rollouts_per_s": sum(row["train/rollouts"] for row in steady) / seconds,
        "rollouts_per_s_of_runs": _rates(runs),
        "s_of_runs": [_length(steps).seconds for steps in runs],
        "tokens_per_s": sum(row["train/tokens"] for row in steady) / seconds,
        "rollouts_a_version": mean(row["train/rollouts"] for row in steady),
        "s_a_version": seconds / len(steady),
        "busy": {"generator": busy_share(generator), "learner": busy_share(learner)},
        "gpu_busy": {pool: _mean(steady, f"perf/{pool}/gpu_busy") for pool in ("generator", "learner")},
        "gpu_watts": {pool: _mean(steady, f"perf/{pool}/gpu_watts") for pool in ("generator", "learner")},
        "shares": {"generator": _shares(generator), "learner": _shares(learner)},
        "generator_work_s": _work(generator),
        "learner_work_s": _work(learner),
        "staleness_mean": mean(row["train/staleness/mean"] for row in steady),
        "staleness_max": max(row["train/staleness/max"] for row in steady),
        "pause_ms_p50": next(
            (row["sync/pause_ms_p50"] for row in reversed(steady) if "sync/pause_ms_p50" in row), None
        ),
        "s_to_reward": None if None in times else median(t for t in times if t is not None),
    }


def _figures(
    details: Mapping[str, Mapping[str, Any]], ratios: Mapping[str, Ratio], target: float
) -> dict[str, Any]:
    figures: dict[str, Any] = {"reward_target": target}
    for mode, found in details.items():
        for key in (
            "rollouts_per_s",
            "bound_rollouts_per_s",
            "staleness_mean",
            "staleness_max",
            "s_to_reward",
        ):
            figures[f"{key}.{mode}"] = found[key]
        for key, pool in product(("busy", "gpu_busy", "gpu_watts"), ("generator", "learner")):
            figures[f"{key}.{pool}.{mode}"] = found[key][pool]
    for rival, ratio in ratios.items():
        name = f"async_over_{rival}"
        figures |= {name: ratio.value, f"{name}.low": ratio.low, f"{name}.high": ratio.high}
    return figures


def _mean(steps: Sequence[Row], key: str) -> float | None:
    """Over the time of the versions that have it; None if none has."""
    seconds = [(row["perf/step_s"], row[key]) for row in steps if key in row]
    return sum(s * value for s, value in seconds) / sum(s for s, _ in seconds) if seconds else None


def _spans_a_version(steps: Sequence[Row], prefix: str) -> dict[str, float]:
    """Mean seconds per version of each span."""
    every = [{key[len(prefix) :]: s for key, s in row.items() if key.startswith(prefix)} for row in steps]
    names = sorted({name for spans in every for name in spans})
    return {name: sum(spans.get(name, 0.0) for spans in every) / len(every) for name in names}


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()} if total else {}


def _work(seconds: Mapping[str, float]) -> float:
    return sum(s for name, s in seconds.items() if not name.startswith(WAIT) and name != OTHER)


def _rewards(steps: Sequence[Row]) -> list[float]:
    """Mean reward over the last REWARD_VERSIONS versions, at each version that has so many before it."""
    values = [row["rollout/reward/mean"] for row in steps]
    return [mean(values[i - REWARD_VERSIONS : i]) for i in range(REWARD_VERSIONS, len(values) + 1)]


def _seconds_to(steps: Sequence[Row], target: float) -> float | None:
    for at, reward in enumerate(_rewards(steps)):
        if reward >= target:
            return sum(row["perf/step_s"] for row in steps[: at + REWARD_VERSIONS])
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl bench utilization",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="any config that `asyncrl train` takes")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--versions", type=at_least(1), default=30, help="of each run (default: %(default)s)")
    parser.add_argument(
        "--repetitions", type=at_least(1), default=3, help="runs of each mode (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=30.0,
        help="least measured time of a run for a claim, without its first versions (default: %(default)s)",
    )
    parser.add_argument("--dir", default="runs/bench", help="where the run folders go, replaced if there")
    parser.add_argument(
        "--reward", type=float, help="time to this mean reward (default: what every mode reached)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="needs matplotlib (extra 'bench')")
    return parser
