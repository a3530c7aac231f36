"""Days of a run in minutes: does a process, or a folder, grow without end?

    make bench-soak

Scripted answers take no time, so the run makes as many versions in minutes as one of a version a minute in eight days,
with all that belongs to a version: leases, groups, claims, an optimizer step, a publication and flips, rows, traces,
decisions, a checkpoint now and then. Each process's memory, descriptors and threads and each part of the run folder are
looked at while it lives; the last quarter is compared with the second.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from asyncrl.errors import DeadlineError, ProcessDiedError
from asyncrl.system.signals import die_with_parent
from asyncrl.tasks.addition import write_model_folder
from bench.bars import Bar, Measured, figures, number, row, verdict_table
from bench.chaos.processes import family
from bench.output import bench_parser, machine, write_results

VERSIONS = 8 * 24 * 60
"""One a minute for eight days."""

CONFIG = """
run: {{name: soak, dir: {folder}, versions: {versions}}}
model: {{path: {folder}/soak-model}}
tasks: {{source: asyncrl.tasks.addition:train}}
reward: {{function: "asyncrl.tasks.addition:reward"}}
batch: {{groups: 8, group_size: 2}}
algorithm: {{filter: none}}
generator: {{engine: scripted, count: 2, slots: 64, max_tokens: 8, max_length: 24, threads: 1}}
queue: {{max_staleness: 4}}
learner: {{threads: 1, micro_batch_tokens: 2048}}
checkpoint: {{every: 200, keep: 2}}
telemetry: {{trace_mb: 4, rollouts_every: 1000}}
launch: {{quiet: true}}
"""

PROCESSES = ("launcher", "queue", "learner", "generator-0", "generator-1")
BOUNDED = ("queue", "checkpoints", "trace")
"""Parts of the run folder that must stay as large as they are; all others have rows of each version."""

LOOK_S, DEADLINE_S = 1.0, 7200.0

BARS = [
    *(Bar(f"growth.rss.{name}", 1.05, most=True) for name in PROCESSES),
    *(Bar(f"growth.fds.{name}", 1.0, most=True) for name in PROCESSES),
    *(Bar(f"growth.threads.{name}", 1.0, most=True) for name in PROCESSES),
    *(Bar(f"growth.mb.{name}", 1.5, most=True) for name in BOUNDED),
]

Sample = dict[str, float]


def watched(folder: Path, versions: int) -> list[Sample]:
    """Samples of a run of so many versions, in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "soak", ignore_errors=True)
    write_model_folder(folder / "soak-model", hidden_size=32, layers=2)
    config = folder / "soak.yaml"
    config.write_text(CONFIG.format(folder=folder, versions=versions), encoding="utf-8")
    samples: list[Sample] = []
    begun = time.monotonic()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "asyncrl", "train", str(config)], preexec_fn=die_with_parent
    )
    try:
        while launcher.poll() is None:
            if time.monotonic() - begun > DEADLINE_S:
                raise DeadlineError("bench.soak", "the run", "its end", DEADLINE_S)
            samples.append(
                {"s": time.monotonic() - begun, **_processes(launcher.pid), **_folders(folder / "soak")}
            )
            time.sleep(LOOK_S)
    finally:
        launcher.kill()
        launcher.wait()
    if launcher.returncode:
        raise ProcessDiedError(f"the run ended with {launcher.returncode}")
    return samples


def _processes(launcher: int) -> Sample:
    found: Sample = {}
    for process in family(launcher):
        try:
            words = process.cmdline()
            name = next((one for one in PROCESSES if one in words), None)
            name = "launcher" if process.pid == launcher else name
            if name is not None:
                found[f"rss.{name}"] = process.memory_info().rss / 1e6
                found[f"fds.{name}"] = process.num_fds()
                found[f"threads.{name}"] = process.num_threads()
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
    return found


def _folders(run: Path) -> Sample:
    """Megabytes of each part of the run folder."""
    parts = list(run.iterdir()) if run.is_dir() else []
    return {f"mb.{part.name}": _bytes(part) / 1e6 for part in parts}


def _bytes(part: Path) -> int:
    total = 0
    for path in [part, *part.rglob("*")]:
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pruned meanwhile
            continue
    return total


def measured(samples: Sequence[Mapping[str, float]], versions: int) -> Measured:
    """Medians of the second and the last quarter, and how much larger the last one is."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    found: dict[str, float] = {"seconds": samples[-1]["s"], "versions_per_s": versions / samples[-1]["s"]}
    for name in sorted({name for sample in late for name in sample} - {"s"}):
        before, after = (
            median(sample[name] for sample in part if name in sample) if any(name in s for s in part) else 0.0
            for part in (early, late)
        )
        found[f"early.{name}"], found[f"late.{name}"] = before, after
        found[f"growth.{name}"] = after / before if before else 1.0
    return found


def table(found: Measured, versions: int) -> str:
    lines = [
        "# Days of a run in minutes",
        "",
        f"`make bench-soak`: {versions:,} versions of 16 scripted rollouts in {found['seconds']:,.0f} s. {machine()}",
        "",
        "Medians of the second quarter and of the last one.",
        "",
        "| process | MB then | MB now | descriptors | threads |",
        "|---|--:|--:|--:|--:|",
    ]
    for name in PROCESSES:
        cells = [number(found.get(f"{part}.rss.{name}"), ".1f") for part in ("early", "late")]
        counts = [
            " → ".join(number(found.get(f"{part}.{kind}.{name}"), ".0f") for part in ("early", "late"))
            for kind in ("fds", "threads")
        ]
        lines.append(row([name, *cells, *counts]))
    lines += ["", "| in the run folder | MB then | MB now | bytes a version |", "|---|--:|--:|--:|"]
    for part in sorted(name.removeprefix("late.mb.") for name in found if name.startswith("late.mb.")):
        before, after = found[f"early.mb.{part}"], found[f"late.mb.{part}"]
        each = (
            (after - before) * 1e6 / (versions / 2)
        )  # the middles of the quarters are half of the run apart
        lines.append(row([part, number(before, ".2f"), number(after, ".2f"), number(each, ",.0f")]))
    return "\n".join([*lines, "", *verdict_table(found, BARS), ""])


def main() -> None:
    parser = bench_parser("soak", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="where the run folder goes")
    parser.add_argument("--versions", type=int, default=VERSIONS, help="(default: %(default)s)")
    args = parser.parse_args()
    found = figures([measured(watched(args.dir, args.versions), args.versions)], BARS)
    print(text := table(found, args.versions), flush=True)
    result: dict[str, Any] = {"figures": found, "versions": args.versions}
    write_results(args.json, result, args.table, text)


if __name__ == "__main__":
    main()
