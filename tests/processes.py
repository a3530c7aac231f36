"""Starting, watching and killing the processes of a run from a test; every wait has a deadline."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file
from torch import Tensor

DEADLINE_S = 90.0
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

Process = subprocess.Popen[str]


@contextmanager
def started(*words: str) -> Iterator[Process]:
    """`python -m …`, or `python FILE.py …`; killed with all its children on the way out, if it still runs."""
    module = [] if words[0].endswith(".py") else ["-m"]
    process = subprocess.Popen(
        [sys.executable, *module, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENV,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for one in family(process.pid):
            one.kill()
        process.communicate(timeout=DEADLINE_S)


def finished(process: Process) -> tuple[int, str]:
    """(exit code, what it printed)."""
    printed, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, printed


def family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


def child(process: Process, *words: str) -> psutil.Process:
    """The one descendant whose command line has all these words; waits for it."""

    def find() -> psutil.Process | None:
        for one in family(process.pid):
            try:
                if one.pid != process.pid and set(words) <= set(one.cmdline()):
                    return one
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return None

    return until(find, f"a child with {words}", process)


def until(look: Callable[[], Any], what: str, *alive: Process) -> Any:
    """The first true answer of `look`; fails when a process that must be alive has ended, or at the deadline."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        for process in alive:
            assert process.poll() is None, (
                f"waiting for {what}: {process.args} ended\n{process.communicate()[0]}"
            )
        time.sleep(0.02)
    raise AssertionError(f"no {what} within {DEADLINE_S:.0f} s")


def rows(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that tell of a step."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [row for line in lines if "step_s" in (row := json.loads(line))]


def final_weights(run: Path) -> dict[str, Tensor]:
    """Of the policy that a run has ended with; it must fit into one file."""
    (file,) = (run / "final").glob("*.safetensors")
    return load_file(file)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def trained(run: Path, version: int) -> Callable[[], bool]:
    return lambda: any(row["version"] >= version for row in rows(run))


def newest_checkpoint(run: Path) -> int:
    """-1: there is none yet. They are written beside the steps and may become whole some versions later."""
    return max((int(path.name[1:]) for path in (run / "checkpoints").glob("v*")), default=-1)


def interrupt(process: Process) -> None:
    process.send_signal(signal.SIGINT)
