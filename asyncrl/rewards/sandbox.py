"""Runs untrusted programs in isolation, on Linux only.

                            isolation: namespaces                 isolation: limits
    network                 an empty one of its own; no sockets   no sockets
    files                   read-only but a folder of its own     the user's rights
    other processes         hidden                                visible, but they get no signals
    CPU, memory, processes  limited                               limited
    end                     killed with all that it started       killed with all that it started

`sandbox_process.py` runs inside.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncrl.config.sections.rules import require

Isolation = Literal["namespaces", "limits"]

SCRIPT = Path(__file__).with_name("sandbox_process.py")
START_S = 20.0
"""Time beyond `wall_s`, for the start of the interpreter on a busy machine."""


class SandboxError(Exception):
    """The sandbox itself failed, and the program's result is unknown."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a program. CPU and memory apply to each process, files to all together, and wall_s to all runs."""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mb: int = 1024
    file_mb: int = 16
    processes: int = 16
    output_kb: int = 64

    def __post_init__(self) -> None:
        for key, value in dataclasses.asdict(self).items():
            require(value > 0, key, value, "must be above 0", f"set {key}=1 or more")


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """The result of one run.

    ended   "exit": by itself; "time": killed at the deadline; "output": killed for too much output
    code    the exit status, or minus the number of the signal that killed it
    out     stdout, up to `Limits.output_kb`
    passed  the result of each test; None without tests, or if the program did not reach their end
    """

    ended: Literal["exit", "time", "output"]
    code: int
    out: str
    passed: Sequence[bool] | None

    @property
    def well(self) -> bool:
        """Whether it ended by itself, with status 0."""
        return self.ended == "exit" and self.code == 0


class Sandbox:
    """Runs programs. Several threads may use it at once."""

    def __init__(self, limits: Limits, isolation: Isolation = "namespaces") -> None:
        self._limits, self._isolation = limits, isolation

    def probe(self) -> str | None:
        """The reason why this machine cannot run a harmless program in it, or None."""
        if sys.platform != "linux":
            return "it needs Linux"
        try:
            (run,) = self.run("import json, random, decimal; print(json.dumps(42))", inputs=[""])
        except SandboxError as error:
            return str(error)
        return None if run.well and run.out == "42\n" else f"a program that prints 42 gave {run}"

    def run(
        self, program: str, inputs: Sequence[str] = ("",), tests: Sequence[str] | None = None
    ) -> list[ProgramRun]:
        """Run the program once for each text of `inputs`, its stdin. This blocks.

        tests: programs that run after it, in its own namespace. Raises SandboxError if the sandbox failed.
        """
        with tempfile.TemporaryDirectory(prefix="asyncrl-sandbox-", ignore_cleanup_errors=True) as folder:
            job = {
                "limits": dataclasses.asdict(self._limits),
                "isolation": self._isolation,
                "folder": folder,
                "program": program,
                "inputs": list(inputs),
                "tests": None if tests is None else list(tests),
            }
            runs = json.loads(self._process(json.dumps(job).encode(), folder))
        return [ProgramRun(**run) for run in runs]

    def _process(self, job: bytes, folder: str) -> bytes:
        process = subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "HOME": folder,
                "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
            },
            start_new_session=True,
        )
        try:
            out, err = process.communicate(job, timeout=self._limits.wall_s + START_S)
        except subprocess.TimeoutExpired:
            raise SandboxError(f"it did not end {START_S:.0f} s after its deadline") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode != 0 or not out:
            lines = err.decode(errors="replace").strip().splitlines()
            raise SandboxError(lines[-1] if lines else f"it ended with status {process.returncode}")
        return out
