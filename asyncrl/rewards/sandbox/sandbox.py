"""The protocol of sandboxes, and its records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from asyncrl.config.rules import require

PRINTS_42 = "import json, random, decimal; print(json.dumps(42))"


class SandboxError(Exception):
    """The sandbox itself failed, and the program's result is unknown."""


class TestsError(ValueError):
    """The tests cannot be judged, whatever the program does: the task is at fault."""

    __test__ = False


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a program.

    wall_s     time for each input or test
    total_s    time for all inputs or tests of a program
    cpu_s      CPU time of each process for one input or test
    memory_mb  memory of each process
    file_mb    files of all processes together
    processes  how many it may have, threads included
    output_kb  of stdout
    """

    wall_s: float = 10.0
    total_s: float = 30.0
    cpu_s: int = 10
    memory_mb: int = 1024
    file_mb: int = 16
    processes: int = 16
    output_kb: int = 64

    def __post_init__(self) -> None:
        for key, value in dataclasses.asdict(self).items():
            require(value > 0, key, value, "must be above 0", f"set {key}=1 or more")


@dataclass(frozen=True, slots=True)
class Tests:
    """Python texts with asserts. They share a namespace, in which the program's functions are called by their names.

    entry: names of functions that alone are the program's; without it, every name that the texts do not define.
    """

    texts: Sequence[str]
    entry: Sequence[str] = ()

    __test__ = False


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """The result of one run.

    ended   "exit": by itself; "time": killed at the deadline; "output": killed for too much output
    code    the exit status, or minus the number of the signal that killed it
    out     stdout, up to `Limits.output_kb`; empty with tests
    passed  the result of each test; None without tests, or if the program itself did not end well
    """

    ended: Literal["exit", "time", "output"]
    code: int
    out: str
    passed: Sequence[bool] | None

    @property
    def well(self) -> bool:
        """Whether it ended by itself, with status 0."""
        return self.ended == "exit" and self.code == 0


class Sandbox(Protocol):
    """Runs programs. Made with `Limits`; several threads may use it at once."""

    def run(
        self, program: str, inputs: Sequence[str] = ("",), tests: Tests | None = None
    ) -> list[ProgramRun]:
        """Run the program once for each text of `inputs`, its stdin; or once for all `tests`. This blocks.

        The program must not see the tests, and must not decide about their results.

        Raises:
            SandboxError: The sandbox failed, or the program broke it.
            TestsError: The tests cannot be judged for any program.
        """
        ...


def sandbox_problem(sandbox: Sandbox) -> str | None:
    """The reason why a sandbox cannot run harmless programs here, or None."""
    try:
        (run,) = sandbox.run(PRINTS_42)
        (tested,) = sandbox.run(
            "def f(x): return 2 * x", tests=Tests(["assert f(2) == 4", "assert f(2) == 5"])
        )
    except SandboxError as error:
        return str(error)
    if not run.well or run.out != "42\n":
        return f"a program that prints 42 gave {run}"
    if tested.passed is None or list(tested.passed) != [True, False]:
        return f"a program with a right and a wrong test gave {tested}"
    return None
