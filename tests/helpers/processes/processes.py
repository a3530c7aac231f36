"""Starting, watching and killing the processes of a run from a test; every wait has a deadline."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import forked
import psutil
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.system.signals import die_with_parent

DEADLINE_S = 90.0
STARTS_S = 300.0
"""vLLM and clusters start in seconds, or in minutes where many share the cores."""

FOR_EVER = "run.versions=100000"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

PORTS = (20_000, 32_000)
"""Below those that the kernel gives to sockets that want any."""
_TAKEN: list[socket.socket] = []

Process = subprocess.Popen[str]


@contextmanager
def started(
    *words: str, executed: bool = False, env: Mapping[str, str] | None = None, python: str = sys.executable
) -> Iterator[Process]:
    """`python -m …`, or `python FILE.py …`; killed with all its children on the way out, if it still runs.

    It is forked from a process that has imported torch and asyncrl, unless it is to be `executed`, or by another
    `python`.
    """
    module = [] if words[0].endswith(".py") else ["-m"]
    executed |= python != sys.executable or not forked.AVAILABLE
    start = subprocess.Popen if executed else forked.ForkedProcess
    process = start(
        [python, *module, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**ENV, **(env or {})},
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        yield process
    finally:
        for one in family(process.pid):
            with suppress(psutil.NoSuchProcess):  # some end with those that were killed
                one.kill()
        process.communicate(timeout=DEADLINE_S)


@contextmanager
def signals_must_be_heard() -> Iterator[None]:
    """Inside, a signal to this process that the code under test does not handle fails the test and spares pytest."""

    def unheard(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"nobody handles {signal.Signals(number).name}")

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = {number: signal.signal(number, unheard) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finished(process: Process, deadline_s: float = DEADLINE_S) -> tuple[int, str]:
    """(exit code, what it printed)."""
    printed, _ = process.communicate(timeout=deadline_s)
    return process.returncode, printed


def succeeded(process: Process, deadline_s: float = DEADLINE_S) -> str:
    """Wait for its end with exit code 0. Returns what it printed."""
    code, printed = finished(process, deadline_s)
    assert code == 0, f"{process.args}\n{printed}"
    return printed


def ran(*words: str, executed: bool = False, deadline_s: float = DEADLINE_S) -> str:
    """Start a process as `started` does and wait for its success. Returns what it printed."""
    with started(*words, executed=executed) as process:
        return succeeded(process, deadline_s)


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
                if one.pid != process.pid and set(words) <= set(" ".join(one.cmdline()).split()):
                    return one
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return None

    return until(find, f"a child with {words}", process)


def until(look: Callable[[], Any], what: str, *alive: Process, deadline_s: float = DEADLINE_S) -> Any:
    """The first true answer of `look`; fails when a process that must be alive has ended, or at the deadline."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        for process in alive:
            assert process.poll() is None, (
                f"waiting for {what}: {process.args} ended\n{process.communicate()[0]}"
            )
        time.sleep(0.02)
    raise AssertionError(f"no {what} within {deadline_s:.0f} s")


def runs(pid: int) -> bool:
    """Whether this process, of whomever it is, still runs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def rows(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that tell of a step."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [row for line in lines if "perf/step_s" in (row := json.loads(line))]


def final_weights(run: Path) -> dict[str, Tensor]:
    """Of the policy that a run has ended with; it must fit into one file."""
    (file,) = (run / "final").glob("*.safetensors")
    return load_file(file)


def free_port() -> int:
    """A port that nobody else is given: the kernel gives out none of these by itself, and other processes of the tests
    see by a name in the kernel, which is kept until this one ends, that it is taken."""
    for _ in range(1000):
        port = random.SystemRandom().randrange(*PORTS)
        name, listener = socket.socket(socket.AF_UNIX), socket.socket()
        with listener:
            try:
                if sys.platform == "linux":
                    name.bind(f"\0asyncrl-tests-port-{port}")
                listener.bind(("127.0.0.1", port))
            except OSError:
                name.close()
                continue
        _TAKEN.append(name)
        return port
    raise AssertionError(f"no free port in {PORTS}")


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def versions(run: Path) -> list[int]:
    """Those that metrics.jsonl has a step for, in its order."""
    return [row["version"] for row in rows(run)]


def until_trained(run: Path, version: int, *alive: Process, deadline_s: float = DEADLINE_S) -> None:
    """Wait for this version or a later one."""
    until(
        lambda: max(versions(run), default=0) >= version, f"version {version}", *alive, deadline_s=deadline_s
    )


def kill_after(run: Path, versions: Sequence[int], launcher: Process, *words: str) -> None:
    """After each of these versions, kill the launcher's child that has these words."""
    for version in versions:
        until_trained(run, version, launcher)
        victim = child(launcher, *words)
        victim.kill()
        victim.wait()


def queue_address(run: Path, queue: Process) -> str:
    """The key with the queue's address, which it writes into the run's folder; waits for it."""
    path = run / "address"
    until(path.exists, "address", queue)
    return f"queue.address={path.read_text().strip()}"


def summary_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def counts_of(run: Path) -> tuple[int, int, int]:
    """(versions, groups trained, tasks dropped), by the summary."""
    summary = summary_of(run)
    return summary["versions"], summary["groups_trained"], summary["tasks_dropped"]


def newest_checkpoint(run: Path) -> int:
    """-1: there is none yet. They are written beside the steps and may become whole some versions later."""
    return max((int(path.name[1:]) for path in (run / "checkpoints").glob("v*")), default=-1)


def interrupt(process: Process) -> None:
    process.send_signal(signal.SIGINT)
