"""The four runs: the demo's recipe, each with one thing that is different."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from bench.process import ONE_THREAD, ROOT, cpu_s

RECIPE = "configs/recipes/demo.yaml"
COMMON = ("run.target_accuracy=null", "evaluation.every=5", "telemetry.rollouts_every=2", "launch.quiet=true")
DEADLINE_S = 900.0
SLOW = {"slow-generator": ("generator-1", b'"generate"', 0.6), "stale-data": ("learner", b'"lane"', 0.15)}
"""A process of a run that stands still for so many seconds, then goes on for a slice, by turns: its machine is busy.
That begins when its trace has the text, e.g. its first group."""

HELD = {"slow-generator": "generator-0"}
"""A process that stands still until that begins: it would make all groups before the other has started."""

SLICE_CPU_S, SLICE_S = 0.05, 0.25
"""A slice: so much time of a core, so that it is as long on a busy machine, or so many seconds if it has less to do."""

RUNS = {
    "healthy": ("run.versions=40", "generator.count=2"),
    # Without forks, so that generator-0 has not made groups yet when it is held.
    "slow-generator": ("run.versions=30", "generator.count=2", "queue.max_staleness=1", "launch.fork=false"),
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


def make(name: str, folder: Path) -> None:
    """Run one in `folder`/`name`. RuntimeError with the end of its output if it fails."""
    try:
        with slowed_down(name, folder):
            subprocess.run(
                [sys.executable, "-m", *command(name, folder)],
                cwd=ROOT,
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)},
                check=True,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
            )
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{name}: {(error.stderr or error.stdout)[-2000:]}") from None


def command(name: str, folder: Path, recipe: str = RECIPE) -> list[str]:
    """The words behind `python -m`."""
    of_run = ("asyncrl", "train", recipe, f"run.name={name}", f"run.dir={folder}")
    return [*of_run, *COMMON, *RUNS[name]]


@contextmanager
def slowed_down(name: str, folder: Path) -> Iterator[None]:
    """Inside, the process of SLOW stands still for most of the time, if the run has one."""
    ended = threading.Event()
    if name in SLOW:
        threading.Thread(target=_slow_down, args=(name, folder / name / "trace", ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _slow_down(name: str, traces: Path, ended: threading.Event) -> None:
    """Stop a process of a run for most of the time, once its trace has begun."""
    slow, begun, stops_s = SLOW[name]
    held: psutil.Process | None = None
    with suppress(psutil.NoSuchProcess):
        while (process := _process(traces / f"{slow}.jsonl", begun)) is None:
            if held is None and name in HELD:
                held = _process(traces / f"{HELD[name]}.jsonl")
                if held is not None:
                    held.suspend()
            if ended.wait(0.2):
                return
        if held is not None:
            held.resume()
        while _sliced(process, ended):
            process.suspend()
            ended.wait(stops_s)
            process.resume()


def _sliced(process: psutil.Process, ended: threading.Event) -> bool:
    """Wait until a process has had its slice; False when all has ended."""
    begun, used = time.monotonic(), cpu_s(process.pid)
    while cpu_s(process.pid) < used + SLICE_CPU_S and time.monotonic() < begun + SLICE_S:
        if ended.wait(SLICE_CPU_S / 5):
            return False
    return True


def _process(trace: Path, begun: bytes = b"") -> psutil.Process | None:
    """The process of a trace; None before it has `begun`."""
    head, ends, _ = (rows := trace.read_bytes() if trace.exists() else b"").partition(b"\n")
    return psutil.Process(json.loads(head)["pid"]) if ends and begun in rows else None
