"""Predictions of the twin beside real runs: rollouts a second, busy shares and staleness.

    make demo && python -m bench.twin --json F --table F

One short run of the demo is the calibration. From its stage times the twin predicts runs with other keys, and these are
made afterwards. The calibration is predicted too: its error is that of the model, without that of other keys. All of
this is repeated, since machines are not as fast at all times: figures are medians over the repetitions.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from asyncrl.config.load import load_config
from asyncrl.errors import DeadlineError, ProcessDiedError
from asyncrl.launch.run_plan import setup_of
from asyncrl.system.signals import die_with_parent
from asyncrl.telemetry.sinks import read_rows
from asyncrl.twin.calibrate import calibrate
from asyncrl.twin.simulate import simulate
from asyncrl.twin.times import StageTimes
from bench.bars import Measured, number, row
from bench.output import bench_parser, machine, write_results

CALIBRATION = "calibration"
RUNS: Mapping[str, tuple[str, ...]] = {
    CALIBRATION: (),
    "two generators": ("generator.count=2",),
    "one-step": ("queue.max_staleness=1",),
    "synchronous": ("queue.max_staleness=0", "generator.fixed_shape=false"),
    "max_staleness 8": ("queue.max_staleness=8",),
    "less depth": ("queue.depth=128",),
    "slower generator": ("generator.slots=32",),
}
"""Keys that differ from those of the calibration. With 32 slots a generator decodes fewer sequences at once: slower."""

Sides = dict[str, Measured]
"""What was 'predicted' of a run, and 'measured'."""

FIRST = 3
"""Versions that are left out, as in a calibration."""

DEADLINE_S = 900.0
FORMS = {"rollouts_per_s": ".0f", "busy.generator": ".0%", "busy.learner": ".0%", "staleness": ".2f"}


def overrides(args: argparse.Namespace, name: str) -> list[str]:
    """The keys of a run, as words."""
    return [
        *(f"run.name={run_name(name)}", f"run.dir={args.dir}", f"run.versions={args.versions}"),
        *(f"model.path={args.model}", "run.target_accuracy=null", "evaluation.source=null"),
        *(
            f"checkpoint.every={args.versions}",
            "launch.quiet=true",
            "generator.threads=1",
            "learner.threads=1",
        ),
        *RUNS[name],
    ]


def run_name(name: str) -> str:
    return f"twin-{name.replace(' ', '-')}"


def live(args: argparse.Namespace, name: str) -> Path:
    """The folder of a run that has been made."""
    folder = Path(args.dir) / run_name(name)
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "asyncrl", "train", args.config, *overrides(args, name)]
    print(f"{name}: {' '.join(RUNS[name])}", flush=True)
    try:
        ended = subprocess.run(command, preexec_fn=die_with_parent, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise DeadlineError("bench.twin", f"the run {run_name(name)}", "its end", DEADLINE_S) from None
    if ended.returncode:
        raise ProcessDiedError(f"the run {run_name(name)} ended with {ended.returncode}")
    return folder


def measured(folder: Path) -> Measured:
    """Means over the time, not over the versions."""
    rows = [each for each in read_rows(folder / "metrics.jsonl") if "perf/step_s" in each][FIRST:]
    seconds = sum(each["perf/step_s"] for each in rows)
    busy = {f"busy.{pool}": over_time(rows, f"perf/busy/{pool}") for pool in ("generator", "learner")}
    rate, staleness = sum(each["train/rollouts"] for each in rows) / seconds, "train/staleness/mean"
    return {"rollouts_per_s": rate, **busy, "staleness": mean(each[staleness] for each in rows)}


def over_time(rows: Sequence[Mapping[str, float]], key: str) -> float:
    """The mean of a share, weighed by time. Rows of short versions may lack that of generators, which report it less
    often."""
    having = [each for each in rows if key in each]
    return sum(each[key] * each["perf/step_s"] for each in having) / sum(
        each["perf/step_s"] for each in having
    )


def predicted(args: argparse.Namespace, name: str, times: StageTimes) -> Measured:
    """From the configuration and the stage times alone, of the versions that are measured: staleness takes long to rise
    to its bound where generators are little faster than the learner."""
    config = load_config(args.config, overrides(args, name))
    outcome = simulate(setup_of(config), times, args.versions - FIRST, warm_up=FIRST)
    return {
        "rollouts_per_s": outcome.groups_per_s * config.batch.group_size,
        "busy.generator": outcome.busy("generators"),
        "busy.learner": outcome.busy("learner"),
        "staleness": outcome.mean_staleness,
    }


def main() -> None:
    parser = bench_parser("twin", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="configs/recipes/demo.yaml")
    parser.add_argument("--model", default="runs/addition/warm", help="warm-started model folder")
    parser.add_argument("--dir", default="runs", help="where the run folders go")
    parser.add_argument("--versions", type=int, default=40, help="of each run (default: %(default)s)")
    parser.add_argument(
        "--repetitions", type=int, default=3, help="of all runs in turns (default: %(default)s)"
    )
    args = parser.parse_args()
    repetitions = [repetition(args) for _ in range(args.repetitions)]
    errors = {name: [error(each[name]) for each in repetitions] for name in RUNS}
    print(text := table(repetitions, args.versions))
    figures = {f"error.{name}": median(each) for name, each in errors.items()}
    write_results(
        args.json, {"figures": figures, "errors": errors, "repetitions": repetitions}, args.table, text
    )


def repetition(args: argparse.Namespace) -> dict[str, Sides]:
    """The calibration and the other runs, one after another."""
    first = live(args, CALIBRATION)
    times = calibrate(first)
    found: dict[str, Sides] = {name: {"predicted": predicted(args, name, times)} for name in RUNS}
    for name, each in found.items():
        each["measured"] = measured(first if name == CALIBRATION else live(args, name))
    return found


def error(found: Mapping[str, Measured]) -> float:
    """Of the predicted rollouts a second, as a share of the measured ones."""
    return found["predicted"]["rollouts_per_s"] / found["measured"]["rollouts_per_s"] - 1


def table(repetitions: Sequence[Mapping[str, Sides]], versions: int) -> str:
    lines = [
        "# Predictions of the twin beside real runs",
        "",
        f"`python -m bench.twin`, runs of {versions} versions of the demo, the first {FIRST} left out, and medians of "
        f"{len(repetitions)} repetitions. Stage times are of the calibration of the same repetition alone. {machine()}",
        "",
        "| run | rollouts/s, predicted | measured | error | from | to | generators busy, predicted | measured "
        "| learner busy, predicted | measured | staleness, predicted | measured |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name in repetitions[0]:
        cells = [
            number(median(each[name][side][key] for each in repetitions), form)
            for key, form in FORMS.items()
            for side in ("predicted", "measured")
        ]
        errors = [error(each[name]) for each in repetitions]
        shown = [f"{value:+.0%}" for value in (median(errors), min(errors), max(errors))]
        lines.append(row([name, *cells[:2], *shown, *cells[2:]]))
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
