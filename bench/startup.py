"""Seconds from `asyncrl train` to the first trained version, and from a generator's death to its successor.

    make demo && python -m bench.startup --json F --table F

Runs of the demo take turns: with processes that are forked from one that has imported torch, and with processes that
import it each by itself. The bound is the time in which one process imports it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TypeVar

import psutil

from asyncrl.errors import DeadlineError
from asyncrl.observability.timeline import ProcessTrace
from asyncrl.system.signals import die_with_parent
from asyncrl.telemetry.sinks import read_rows
from bench.bars import Bar, Measured, figures, row, verdict_table
from bench.output import bench_parser, machine, write_results
from bench.process import cpu_s

BARS = (
    Bar("first_version_s.forked", 8.0, most=True),
    Bar("first_version_s.forked", 1.5, over="imports_s", most=True),
    Bar("successor_s.forked", 0.5, over="successor_s.executed", most=True),
)
MODES = {"forked": "true", "executed": "false"}
DEADLINE_S, LOOK_S = 300.0, 0.02
IMPORTS = "import asyncrl.learner.process, asyncrl.generator.process, os; os._exit(0)"
Found = TypeVar("Found")


def until(look: Callable[[], Found | None], what: str) -> Found:
    end = time.monotonic() + DEADLINE_S
    while (found := look()) is None:
        if time.monotonic() > end:
            raise DeadlineError("bench.startup", "the run", what, DEADLINE_S)
        time.sleep(LOOK_S)
    return found


def measured(args: argparse.Namespace, mode: str) -> Measured:
    """One run, whose generator is killed once it has trained a version. It is stopped once the next one has loaded."""
    folder = Path(args.dir) / f"startup-{mode}"
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "asyncrl", "train", args.config, f"model.path={args.model}"),
        *(f"run.name={folder.name}", f"run.dir={args.dir}", "run.target_accuracy=null"),
        *("evaluation.source=null", "launch.quiet=true", f"launch.fork={MODES[mode]}"),
    ]
    began = time.time()
    launcher = psutil.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=die_with_parent
    )
    try:
        first = until(lambda: first_version(folder), "the first version")
        trace = ProcessTrace(folder / "trace" / "generator-0.jsonl")
        killed_at = time.time()
        next(one for one in launcher.children() if "generator" in " ".join(one.cmdline()).split()).kill()
        successor = until(lambda: loaded(trace, killed_at), "the next generator")
        used = cpu_s(launcher.pid, *(one.pid for one in launcher.children(recursive=True)))
    finally:
        launcher.terminate()
        launcher.wait(DEADLINE_S)
    return {
        f"first_version_s.{mode}": first - began,
        f"successor_s.{mode}": successor - killed_at,
        f"cpu_s.{mode}": used,
    }


def first_version(folder: Path) -> float | None:
    """The time of its row, in seconds since 1970."""
    rows = (each for each in read_rows(folder / "metrics.jsonl") if "perf/step_s" in each)
    return next((each["time"] for each in rows), None)


def loaded(trace: ProcessTrace, killed_at: float) -> float | None:
    """When the generator that began after the kill made its first tokens."""
    trace.read()
    spans = trace.lanes["engine"].spans if "engine" in trace.lanes else []
    return next(
        (span.start for span in spans if span.name == "compute" and span.start > trace.begun > killed_at),
        None,
    )


def imports_s() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.monotonic() - began


def main() -> None:
    parser = bench_parser("startup", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="configs/recipes/demo.yaml")
    parser.add_argument("--model", default="runs/addition/warm", help="warm-started model folder")
    parser.add_argument("--dir", default="runs", help="where the run folders go")
    parser.add_argument("--rounds", type=int, default=5, help="of both (default: %(default)s)")
    args = parser.parse_args()
    repetitions: list[Measured] = []
    for number in range(args.rounds):
        one = {"imports_s": imports_s()}
        for mode in MODES:
            one |= measured(args, mode)
        print(f"{number}: " + ", ".join(f"{name} {value:.2f}" for name, value in one.items()), flush=True)
        repetitions.append(one)
    beside = [
        ("first_version_s.executed", "first_version_s.forked"),
        ("successor_s.executed", "successor_s.forked"),
    ]
    found = figures(repetitions, BARS, beside)
    print(text := table(found, repetitions))
    write_results(args.json, {"figures": found, "repetitions": repetitions}, args.table, text)


def table(found: Measured, repetitions: list[Measured]) -> str:
    lines = [
        "# The start of a run",
        "",
        f"`python -m bench.startup`, medians of {len(repetitions)} rounds of the demo, in turns. {machine()} One "
        f"process imports torch, transformers and what a learner and a generator need in "
        f"{median(one['imports_s'] for one in repetitions):.1f} s.",
        "",
        "| processes are | s to the first trained version | from a kill to the next generator's first token "
        "| CPU s, all processes |",
        "|---|--:|--:|--:|",
    ]
    for mode in MODES:
        cells = [f"{found[f'{name}.{mode}']:.1f}" for name in ("first_version_s", "successor_s", "cpu_s")]
        lines.append(row([mode, *cells]))
    return "\n".join([*lines, "", *verdict_table(found, BARS), ""])


if __name__ == "__main__":
    main()
