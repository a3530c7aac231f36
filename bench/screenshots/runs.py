"""The four runs: the demo's recipe, each with one thing that is different."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil

from bench.process import ONE_THREAD, ROOT

RECIPE = "configs/recipes/demo.yaml"
COMMON = ("run.target_accuracy=null", "evaluation.every=5", "telemetry.rollouts_every=2", "launch.quiet=true")
DEADLINE_S = 900.0
SLOW = {"slow-generator": ("generator-1", b'"generate"', 0.6), "stale-data": ("learner", b'"lane"', 0.3)}
"""A process of a run that stands still for so many seconds, then goes on for RUNS_S, by turns: its machine is busy.
That begins when its trace has the text, e.g. its first group."""

RUNS_S = 0.1

RUNS = {
    "healthy": ("run.versions=40", "generator.count=2"),
    "slow-generator": ("run.versions=30", "generator.count=2", "queue.max_staleness=1"),
    "stale-data": (
        "run.versions=40",
        "generator.count=2",
        "queue.max_staleness=16",
        "learner.optimizer.lr=1.5e-3",
    ),
    "hacked-reward": (
        "run.versions=60",
        "reward.function=bench/screenshots/flawed.py:reward",
        "evaluation.source=bench/screenshots/flawed.py:heldout",
        "evaluation.options=null",
        "learner.optimizer.lr=1e-3",
    ),
}


def make(name: str, folder: Path, *keys: str) -> None:
    """Run one in `folder`/`name`, with more keys. RuntimeError with the end of its output if it fails."""
    words = [sys.executable, "-m", "asyncrl", "train", RECIPE, f"run.name={name}", f"run.dir={folder}"]
    env = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}
    ended = threading.Event()
    if name in SLOW:
        process, begun, stops_s = SLOW[name]
        trace = folder / name / "trace" / f"{process}.jsonl"
        threading.Thread(target=_slow_down, args=(trace, begun, stops_s, ended), daemon=True).start()
    try:
        subprocess.run(
            [*words, *COMMON, *RUNS[name], *keys],
            cwd=ROOT,
            env=env,
            check=True,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{name}: {(error.stderr or error.stdout)[-2000:]}") from None
    finally:
        ended.set()


def _slow_down(trace: Path, begun: bytes, stops_s: float, ended: threading.Event) -> None:
    """Stop a process for most of the time, once its trace has `begun`."""
    while not ended.wait(0.2):
        if trace.exists() and begun in (rows := trace.read_bytes()):
            process = psutil.Process(json.loads(rows.partition(b"\n")[0])["pid"])
            break
    else:
        return
    with suppress(psutil.NoSuchProcess):
        while not ended.wait(RUNS_S):
            process.suspend()
            ended.wait(stops_s)
            process.resume()
