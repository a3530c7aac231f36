"""A run whose generators come and go: rollouts a second and busy shares between one change and the next.

    make demo && python -m bench.elastic --json F --table F

The demo is trained with two generators throughout, and with changes at given versions: one more is added, one is
killed (and started again), two leave, one is added. Both runs are of equal length; the ratio of their times is what the
changes cost.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from asyncrl.errors import DeadlineError, ProcessDiedError
from asyncrl.launch.folder.scale import ScaleRequest, scale
from asyncrl.system.signals import die_with_parent
from asyncrl.telemetry.sinks import read_rows
from bench.bars import Measured, number, row
from bench.chaos.processes import kill
from bench.output import bench_parser, machine, write_results

GENERATORS = 2
CHANGES = {0.2: "3 generators", 0.4: "a kill", 0.6: "1 generator", 0.8: "2 generators"}
"""At this share of the versions."""

DEADLINE_S = 1800.0
LOOK_S = 0.1


class ElasticRun:
    """One run under `asyncrl train`; `changes` are made at these versions."""

    def __init__(self, args: argparse.Namespace, name: str, changes: Mapping[int, str]) -> None:
        self._folder, self._changes = Path(args.dir) / f"elastic-{name}", dict(changes)
        self._command = [
            *(sys.executable, "-m", "asyncrl", "train", args.config),
            *(f"run.name=elastic-{name}", f"run.dir={args.dir}", f"run.versions={args.versions}"),
            *(f"model.path={args.model}", "run.target_accuracy=null", "evaluation.source=null"),
            *(f"generator.count={GENERATORS}", "generator.threads=1", "learner.threads=1"),
            *("generator.grace_s=5", "launch.quiet=true"),
        ]

    def live(self) -> list[dict[str, Any]]:
        """The rows of its versions."""
        shutil.rmtree(self._folder, ignore_errors=True)
        begun = time.monotonic()
        launcher = subprocess.Popen(self._command, preexec_fn=die_with_parent)
        try:
            while launcher.poll() is None:
                if time.monotonic() - begun > DEADLINE_S:
                    raise DeadlineError("bench.elastic", "the run", "its end", DEADLINE_S)
                reached = len(self._rows())
                for version in [version for version in self._changes if version <= reached]:
                    self._change(self._changes.pop(version), launcher.pid)
                time.sleep(LOOK_S)
        finally:
            launcher.kill()
            launcher.wait()
        if launcher.returncode:
            raise ProcessDiedError(f"the run ended with {launcher.returncode}")
        return self._rows()

    def _change(self, change: str, launcher: int) -> None:
        print(f"version {len(self._rows())}: {change}", flush=True)
        if change == "a kill":
            kill(launcher, "generator", random.Random(0))
        else:
            scale(str(self._folder), ScaleRequest(int(change.split()[0])))

    def _rows(self) -> list[dict[str, Any]]:
        return [each for each in read_rows(self._folder / "metrics.jsonl") if "perf/step_s" in each]


def phase(rows: Sequence[Mapping[str, Any]]) -> Measured:
    """Busy shares are of the versions of which some generator has reported one: not all have, while it starts."""
    busy = [row["perf/busy/generator"] for row in rows if "perf/busy/generator" in row]
    seconds = sum(each["perf/step_s"] for each in rows)
    return {
        "rollouts_per_s": sum(each["train/rollouts"] for each in rows) / seconds,
        "busy.generator": mean(busy) if busy else 0.0,
        "busy.learner": mean(each["perf/busy/learner"] for each in rows),
        "staleness": mean(each["train/staleness/mean"] for each in rows),
    }


def main() -> None:
    parser = bench_parser("elastic", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="configs/recipes/demo.yaml")
    parser.add_argument("--model", default="runs/addition/warm", help="warm-started model folder")
    parser.add_argument("--dir", default="runs", help="where the run folders go")
    parser.add_argument("--versions", type=int, default=150, help="of each run (default: %(default)s)")
    args = parser.parse_args()
    at = {int(share * args.versions): change for share, change in CHANGES.items()}
    runs = {
        "steady": ElasticRun(args, "steady", {}).live(),
        "changing": ElasticRun(args, "changing", at).live(),
    }
    bounds = [int(0.1 * args.versions), *at, args.versions]
    labels = [f"{GENERATORS} generators", *at.values()]
    phases = {
        name: [phase(rows[start:end]) for start, end in itertools.pairwise(bounds)]
        for name, rows in runs.items()
    }
    seconds = {name: sum(each["perf/step_s"] for each in rows[bounds[0] :]) for name, rows in runs.items()}
    cost = seconds["changing"] / seconds["steady"]
    print(text := table(labels, phases, cost, args.versions))
    figures = {"time_ratio": cost, **{f"seconds.{name}": value for name, value in seconds.items()}}
    write_results(args.json, {"figures": figures, "labels": labels, "phases": phases}, args.table, text)


def table(labels: Sequence[str], phases: Mapping[str, Sequence[Measured]], cost: float, versions: int) -> str:
    lines = [
        "# Generators that come and go",
        "",
        f"`python -m bench.elastic`, two runs of {versions} versions of the demo, with {GENERATORS} generators "
        f"throughout and with changes. {machine()}",
        "",
        "| from | rollouts/s, steady | changing | generators busy, steady | changing | learner busy, steady "
        "| changing |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    forms = {"rollouts_per_s": ".0f", "busy.generator": ".0%", "busy.learner": ".0%"}
    for label, *both in zip(labels, phases["steady"], phases["changing"], strict=True):
        cells = [number(one[name], form) for name, form in forms.items() for one in both]
        lines.append(row([label, *cells]))
    return "\n".join([*lines, "", f"Time of the changing run over that of the steady one: {cost:.2f}.", ""])


if __name__ == "__main__":
    main()
