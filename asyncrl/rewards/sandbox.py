"""A program that nobody trusts, run where it can do no harm. Linux only.

                            isolation: namespaces                 isolation: limits
    network                 none: an own, empty one; no sockets   no sockets
    files                   read-only but for an own folder       what the user may, it may
    other processes         not seen                              seen, but no signal reaches them
    CPU, memory, processes  limited                               limited
    end                     killed with all that it started       killed with all that it started

`jail.py` is what runs inside.
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

JAIL = Path(__file__).with_name("jail.py")
START_S = 20.0
"""Beyond `wall_s`, for the start of the interpreter on a busy machine."""


class SandboxError(Exception):
    """The sandbox itself failed: nothing is known of the program."""


@dataclass(frozen=True, slots=True)
class Limits:
    """wall_s is for all runs of a program together; CPU and memory are of each process, files of all together."""

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
    """How one run ended.

    ended   by itself ("exit"), or killed: at the deadline ("time"), for too much output ("output")
    code    its exit status, minus the signal's number if one killed it
    out     its stdout, up to `Limits.output_kb`
    passed  of each test, if there were tests and the program reached their end
    """

    ended: Literal["exit", "time", "output"]
    code: int
    out: str
    passed: tuple[bool, ...] | None

    @property
    def well(self) -> bool:
        """Whether it ended by itself, with status 0."""
        return self.ended == "exit" and self.code == 0


class Sandbox:
    """Runs programs one by one; several threads may use it at once."""

    def __init__(self, limits: Limits, isolation: Isolation = "namespaces") -> None:
        self._limits, self._isolation = limits, isolation

    def probe(self) -> str | None:
        """Why this machine cannot run a harmless program in it, or None."""
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
        """The program once for each text of `inputs`, its stdin; tests: run after it, in its own world.

        Blocks. Raises SandboxError.
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
            answer = self._talk(json.dumps(job).encode(), folder)
        runs = json.loads(answer)
        return [
            ProgramRun(r["ended"], r["code"], r["out"], None if r["passed"] is None else tuple(r["passed"]))
            for r in runs
        ]

    def _talk(self, job: bytes, folder: str) -> bytes:
        process = subprocess.Popen(
            [sys.executable, "-I", str(JAIL)],
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
            said = err.decode(errors="replace").strip().splitlines()
            raise SandboxError(said[-1] if said else f"it ended with status {process.returncode}")
        return out
