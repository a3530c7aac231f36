"""python -m bench.peers.race: the time to the same accuracy, on the same two cores, from the same warm model.

    make bench-race

Each system is a process of its own, one after the other, every other round in reverse order. The clock runs from the
start of the process to the look at the held-out tasks that finds the target: imports, loading and looks are in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from asyncrl.tasks import addition
from asyncrl.telemetry.sinks import read_rows
from bench.bars import Bar, Measured, figures, number, row, verdict_table
from bench.output import bench_parser, machine, write_results
from bench.peers.goal import GROUPS, SAMPLES, TARGET

TRL = Path("bench/peers/.venv-trl/bin/python")
RECIPE = "configs/recipes/demo.yaml"

BARS = [
    Bar("time_to_target.trl", 6.0, over="time_to_target.asyncrl"),
    Bar("rollouts_per_s.asyncrl", 1.3, over="rollouts_per_s.bare_loop_2"),
]


def loop(
    module: str, python: str, threads: int, folder: Path, model: str, limit_s: float, seed: int
) -> Measured:
    words = [python, "-m", f"bench.peers.{module}", str(folder), model, "--threads", str(threads)]
    words += ["--limit-s", str(limit_s), "--seed", str(seed), "--begun", str(time.time())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s + 120)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return _result(json.loads(done.stdout.splitlines()[-1]))


def asyncrl(folder: Path, model: str, limit_s: float, seed: int) -> Measured:
    """The demo's recipe as it is."""
    run, begun = folder / "race", time.time()
    keys = [
        f"model.path={model}",
        f"run.dir={folder}",
        "run.name=race",
        f"run.seed={seed}",
        "launch.quiet=true",
    ]
    words = [sys.executable, "-m", "asyncrl", "train", RECIPE, *keys, f"run.target_accuracy={TARGET}"]
    subprocess.run(words, capture_output=True, text=True, timeout=limit_s + 120, check=True)
    rows = list(read_rows(run / "metrics.jsonl"))
    looks = [one for one in rows if "eval/accuracy" in one]
    steps = [one["time"] for one in rows if "perf/step_s" in one]
    between = [after - before for before, after in pairwise(steps)]
    reached = next((one for one in looks if one["eval/accuracy"] >= TARGET), looks[-1])
    return _result(
        {
            "accuracy": reached["eval/accuracy"],
            "seconds": reached["time"] - begun,
            "steps": reached["version"],
            "rollouts_per_s": GROUPS * SAMPLES * len(between) / sum(between),
        }
    )


def _result(measured: dict[str, Any]) -> Measured:
    """Without a time to the target where it was not reached."""
    reached = {"time_to_target": measured["seconds"]} if measured["accuracy"] >= TARGET else {}
    return {**reached, **{name: measured[name] for name in ("accuracy", "steps", "rollouts_per_s")}}


def systems() -> dict[str, Callable[..., Measured]]:
    return {
        "asyncrl": asyncrl,
        "trl": partial(loop, "trl_loop", str(TRL), 2),
        "bare_loop_1": partial(loop, "bare_loop", sys.executable, 1),
        "bare_loop_2": partial(loop, "bare_loop", sys.executable, 2),
    }


def repetition(model: str, limit_s: float, seed: int) -> Measured:
    """All systems, one after the other."""
    found: dict[str, float] = {}
    for name, run in sorted(systems().items(), reverse=bool(seed % 2)):
        with tempfile.TemporaryDirectory(prefix="asyncrl-race-") as folder:
            for part, rows in {"train": addition.train(), "heldout": addition.heldout()}.items():
                tasks = [{"prompt": one["prompt"], "answer": one["answer"]} for one in rows]
                Path(folder, f"{part}.json").write_text(json.dumps(tasks))
            for figure, value in run(Path(folder), model, limit_s, seed).items():
                found[f"{figure}.{name}"] = value
        print(
            name,
            {figure: value for figure, value in found.items() if figure.endswith(f".{name}")},
            flush=True,
        )
    return found


def table(found: Measured, rounds: int, limit_s: float) -> str:
    lines = [
        "# A race to the same accuracy",
        "",
        f"`python -m bench.peers.race`, medians of {rounds} rounds. {machine()}",
        "",
        f"Two-digit addition from the demo's warm model: {GROUPS} prompts of {SAMPLES} answers a step, until greedy "
        f"accuracy is {TARGET:.0%} on 500 held-out tasks, or for {limit_s:.0f} s.",
        "",
        "| system | s to the target | accuracy at the end | steps | rollouts/s |",
        "|---|--:|--:|--:|--:|",
    ]
    for name in systems():
        cells = (f"{figure}.{name}" for figure in ("time_to_target", "accuracy", "steps", "rollouts_per_s"))
        texts = (
            number(found.get(cell), form)
            for cell, form in zip(cells, (".0f", ".1%", ".0f", ",.0f"), strict=True)
        )
        lines.append(row([name, *texts]))
    return "\n".join([*lines, "", *verdict_table(found, BARS), ""])


def main() -> None:
    parser = bench_parser("race", __doc__ or "")
    parser.add_argument("--model", default="runs/addition/warm", help="warm-started model folder")
    parser.add_argument("--limit-s", type=float, default=300, help="of each system (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    args = parser.parse_args()
    rounds = [repetition(args.model, args.limit_s, seed) for seed in range(args.rounds)]
    found = figures(rounds, BARS)
    print(text := table(found, args.rounds, args.limit_s), flush=True)
    write_results(args.json, {"figures": found, "rounds": rounds}, args.table, text)


if __name__ == "__main__":
    main()
