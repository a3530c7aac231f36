"""How busy each pool is, and what overlapping them is worth: `asyncrl bench utilization CONFIG`.

The same tasks, seeds and devices are run in the four modes of `modes.py`, one after another, as real processes.
For each: throughput, the share of the time that each pool works and each *named* wait, staleness, and the time
until a reward is reached; beside them the throughput that the measured stage times allow:

    one phase at a time    rollouts of a version / (G + L)
    overlapping            rollouts of a version / max(G, L)

G and L are the seconds of work of a generator and of the learner per version, measured in the same mode
(colocated) or in `sync_split`, where the pools do not disturb each other.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncrl.bench.modes import Mode, modes, spans_of
from asyncrl.bench.plot import draw
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.launch.local import train
from asyncrl.telemetry.sinks import read_rows
from asyncrl.telemetry.spans import OTHER, WAIT, busy_share

WARM_UP_VERSIONS = 3
REWARD_VERSIONS = 5
"""A reward counts as reached when its mean over this many versions is."""

Row = Mapping[str, Any]


def main(words: Sequence[str]) -> int:
    arguments = _parser().parse_args(words)
    rows = {}
    base = load_config(arguments.config, arguments.overrides)
    for mode in modes(base):
        print(f"{mode.name}: {' '.join(mode.overrides)}", flush=True)
        rows[mode.name] = _run(arguments, base, mode)
    report = summarise(rows, modes(base), reward=arguments.reward)
    _print(report)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        draw(report, arguments.plot)
    return 0


def summarise(
    rows: Mapping[str, Sequence[Row]], ways: Sequence[Mode], reward: float | None
) -> dict[str, Any]:
    """{"figures": {name: value}, "modes": {mode: details}}. rows: a version each, per mode."""
    target = min(_best_reward(steps) for steps in rows.values()) if reward is None else reward
    details = {way.name: _measure(rows[way.name], target) for way in ways}
    alone = details["sync_split"]
    for way in ways:
        stages = details[way.name] if way.name == "sync_colocated" else alone
        generate, learn = stages["generator_work_s"], stages["learner_work_s"]
        seconds = max(generate, learn) if way.overlaps else generate + learn
        details[way.name]["bound_rollouts_per_s"] = (
            stages["rollouts_a_version"] / seconds if seconds else None
        )
    return {"figures": _figures(details, target), "modes": details}


def _run(arguments: argparse.Namespace, base: Config, mode: Mode) -> list[Row]:
    name = f"{base.run.name}-{mode.name}"
    folder = Path(arguments.dir) / name
    shutil.rmtree(folder, ignore_errors=True)
    overrides = [
        *arguments.overrides,
        f"run.dir={arguments.dir}",
        f"run.name={name}",
        f"run.versions={arguments.versions}",
        "run.resume=false",
        "run.target_accuracy=null",
        "evaluation.source=null",
        f"checkpoint.every={arguments.versions}",
        "launch.quiet=true",
        *mode.overrides,
    ]
    train(load_config(arguments.config, overrides))
    return [row for row in read_rows(folder / "metrics.jsonl") if "step_s" in row]


def _measure(steps: Sequence[Row], target: float) -> dict[str, Any]:
    """One mode. Rates and shares leave the first versions out, in which everything starts."""
    steady = steps[WARM_UP_VERSIONS:] or steps
    seconds = sum(row["step_s"] for row in steady)
    learner = _spans_a_version(steady, "time/")
    generator = _spans_a_version(steady, "generator/time/")
    return {
        "rollouts_per_s": sum(row["rollouts"] for row in steady) / seconds,
        "tokens_per_s": sum(row["tokens"] for row in steady) / seconds,
        "rollouts_a_version": mean(row["rollouts"] for row in steady),
        "s_a_version": seconds / len(steady),
        "busy": {"generator": busy_share(generator), "learner": busy_share(learner)},
        "shares": {"generator": _shares(generator), "learner": _shares(learner)},
        "generator_work_s": _work(generator),
        "learner_work_s": _work(learner),
        "staleness_mean": mean(row["staleness/mean"] for row in steady),
        "staleness_max": max(row["staleness/max"] for row in steady),
        "pause_ms_p50": next(
            (row["pause_ms_p50"] for row in reversed(steady) if "pause_ms_p50" in row), None
        ),
        "s_to_reward": _seconds_to(steps, target),
    }


def _figures(details: Mapping[str, Mapping[str, Any]], target: float) -> dict[str, Any]:
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
        for pool in ("generator", "learner"):
            figures[f"busy.{pool}.{mode}"] = found["busy"][pool]
    for rival in ("sync_split", "sync_colocated"):
        figures[f"async_over_{rival}"] = details["async"]["rollouts_per_s"] / details[rival]["rollouts_per_s"]
    return figures


def _spans_a_version(steps: Sequence[Row], prefix: str) -> dict[str, float]:
    """Mean seconds per version of each span."""
    every = [spans_of(row, prefix) for row in steps]
    names = sorted({name for spans in every for name in spans})
    return {name: sum(spans.get(name, 0.0) for spans in every) / len(every) for name in names}


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()} if total else {}


def _work(seconds: Mapping[str, float]) -> float:
    return sum(s for name, s in seconds.items() if not name.startswith(WAIT) and name != OTHER)


def _rewards(steps: Sequence[Row]) -> list[float]:
    """Mean reward over the last REWARD_VERSIONS versions, at each version that has so many before it."""
    values = [row["reward/mean"] for row in steps]
    return [mean(values[i - REWARD_VERSIONS : i]) for i in range(REWARD_VERSIONS, len(values) + 1)]


def _best_reward(steps: Sequence[Row]) -> float:
    return max(_rewards(steps), default=0.0)


def _seconds_to(steps: Sequence[Row], target: float) -> float | None:
    for at, reward in enumerate(_rewards(steps)):
        if reward >= target:
            return sum(row["step_s"] for row in steps[: at + REWARD_VERSIONS])
    return None


def _print(report: Mapping[str, Any]) -> None:
    table = Table(title="Utilization")
    for heading in ("mode", "rollouts/s", "bound", "generator", "learner", "staleness", "s to reward"):
        words = heading in ("mode", "generator", "learner")
        table.add_column(
            heading, justify="left" if words else "right", no_wrap=not words or heading == "mode"
        )
    for mode, found in report["modes"].items():
        table.add_row(
            mode,
            f"{found['rollouts_per_s']:.0f}",
            _number(found["bound_rollouts_per_s"], "{:.0f}"),
            _waits(found["busy"]["generator"], found["shares"]["generator"]),
            _waits(found["busy"]["learner"], found["shares"]["learner"]),
            f"{found['staleness_mean']:.1f} ≤ {found['staleness_max']:.0f}",
            _number(found["s_to_reward"], "{:.1f}"),
        )
    console = Console()
    console.print(table)
    console.print(f"reward reached: {report['figures']['reward_target']:.3f}")
    for rival in ("sync_split", "sync_colocated"):
        console.print(f"async over {rival}: {report['figures'][f'async_over_{rival}']:.2f} x")


def _waits(busy: float, shares: Mapping[str, float]) -> str:
    """'84 % busy, groups 12 %': the share of work, then the waits worth a percent."""
    waits = sorted(((s, n) for n, s in shares.items() if n.startswith(WAIT) and s >= 0.01), reverse=True)
    return ", ".join(
        [f"{busy:.0%} busy", *(f"{name.removeprefix(WAIT)} {share:.0%}" for share, name in waits)]
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl bench utilization",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="any config that `asyncrl train` takes")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--versions", type=int, default=30, help="of each run (default: %(default)s)")
    parser.add_argument("--dir", default="runs/bench", help="where the run folders go, replaced if there")
    parser.add_argument(
        "--reward", type=float, help="time to this mean reward (default: what every mode reached)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="needs matplotlib (extra 'bench')")
    return parser
