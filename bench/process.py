"""A process of a bench: told and heard by lines of JSON, with a deadline on every wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Self

import psutil

ROOT = Path(__file__).resolve().parents[1]

DEADLINE_S = 240.0
"""Longest silence of a process."""

CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""By which a process measures. cpu: its own time, for a machine that others use too; it leaves out waits."""

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def cpu_s(*pids: int) -> float:
    """Seconds of a core that these processes have used, user and system. Raises psutil.NoSuchProcess."""
    every = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(times.user + times.system for times in every))


def importing_here() -> dict[str, str]:
    """The environment of a process that imports this checkout first, then what the user's PYTHONPATH has."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


class Process:
    """`python -m …words`, its stderr in `log`, and first told `said`. Its context ends it.

    begins: run between fork and exec
    RuntimeError, with the end of its log, once it says nothing any more.
    """

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        said: Any,
        python: str = sys.executable,
        begins: Callable[[], None] | None = None,
    ) -> None:
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [python, "-m", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env={**os.environ, **ONE_THREAD, **importing_here()},
                preexec_fn=begins,
            )
        self._lines: SimpleQueue[str] = SimpleQueue()
        Thread(target=self._read, daemon=True).start()
        self.tell(said)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, value: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def hears(self, limit_s: float | None = DEADLINE_S) -> Any:
        try:
            line = self._lines.get(timeout=limit_s)
        except Empty:
            line = ""
        if not line:
            raise RuntimeError(f"{self._log.name}:\n{self._log.read_text()[-3000:]}")
        return json.loads(line)

    def ended(self, limit_s: float) -> int:
        """The status that it ends with by itself. subprocess.TimeoutExpired where it does not."""
        return self._process.wait(limit_s)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


class Talk:
    """The process's own end of it: whatever else it prints goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def tell(self, value: Any) -> None:
        self._out.write(json.dumps(value) + "\n")
        self._out.flush()

    def hears(self) -> Any:
        """None once there is nothing more to do."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None
