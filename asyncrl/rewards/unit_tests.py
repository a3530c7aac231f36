"""A reward for programs: runs an answer's Python code against the task's tests, in a sandbox."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config.rules import require
from asyncrl.rewards.sandbox import Limits, ProgramRun, SandboxError, Tests, TestsError, sandbox_named
from asyncrl.rewards.sandbox.sandbox import sandbox_problem
from asyncrl.types import Task

FENCE = re.compile(r"^```[ \t]*+(?:python3?|py)?+[ \t]*+\n(.*?)^```", re.DOTALL | re.MULTILINE)

log = logging.getLogger(__name__)


class UnitTests:
    """1 if the program passes every test, else 0; with `partial`, the share that it passes.

    tests      the field of task.data with asserts: one Python text or several, which call the program's functions
    entry      the field with the name of the function, or names, that alone come from the program; may be missing
    cases      the field with [{"input": stdin, "output": stdout}, …]; outputs are compared outside the sandbox
    partial    whether an answer that passes only some tests earns their share
    sandbox    auto, bubblewrap, namespaces, or a class of your own: file.py:Class (see `sandbox/sandbox.py`)
    wall_s …   the limits, see `sandbox.Limits`

    A task needs `tests` or `cases`. Raises ConfigError if the machine does not permit the sandbox.
    """

    def __init__(
        self,
        tests: str = "tests",
        cases: str = "cases",
        partial: bool = False,
        entry: str = "entry_point",
        sandbox: str = "auto",
        wall_s: float = 10.0,
        total_s: float = 30.0,
        cpu_s: int = 10,
        memory_mb: int = 1024,
        file_mb: int = 16,
        processes: int = 16,
        output_kb: int = 64,
    ) -> None:
        require(wall_s <= total_s, "wall_s", wall_s, f"is above total_s={total_s}", "set total_s higher")
        self._tests, self._cases, self._partial, self._entry = tests, cases, partial, entry
        limits = Limits(wall_s, total_s, cpu_s, memory_mb, file_mb, processes, output_kb)
        self._sandbox = sandbox_named(sandbox, limits)

    def __call__(self, task: Task, text: str) -> float:
        """Raises ValueError for a task that cannot be judged, SandboxError if the sandbox fails for any program."""
        passed = list(self._asserted(task, text))
        if self._partial or all(passed):
            passed += self._solved(task, text)
        if not passed:
            raise ValueError(f"task.data has neither {self._tests!r} nor {self._cases!r}")
        share = sum(passed) / len(passed)
        return share if self._partial else float(share == 1)

    def _asserted(self, task: Task, text: str) -> Sequence[bool]:
        texts = _texts(task.data.get(self._tests))
        if not texts:
            return ()
        tests = Tests(texts, _texts(task.data.get(self._entry)))
        try:
            runs = self._run(text, [""], tests)
        except TestsError as error:
            raise TestsError(f"task.data[{self._tests!r}] cannot be judged: {error}") from None
        passed = [run.passed for run in runs if run.well and run.passed is not None]
        return passed[0] if passed and len(passed[0]) == len(texts) else [False] * len(texts)

    def _solved(self, task: Task, text: str) -> Sequence[bool]:
        cases: Sequence[Mapping[str, Any]] = task.data.get(self._cases, ())
        if not cases:
            return ()
        runs = self._run(text, [str(case["input"]) for case in cases])
        if not runs:
            return [False] * len(cases)
        return [
            run.well and same_output(run.out, str(case["output"]))
            for run, case in zip(runs, cases, strict=True)
        ]

    def _run(self, text: str, inputs: Sequence[str], tests: Tests | None = None) -> list[ProgramRun]:
        """No runs where this program alone broke the sandbox, which then still works for a harmless one."""
        try:
            return self._sandbox.run(program_of(text), inputs, tests)
        except SandboxError as error:
            problem = sandbox_problem(self._sandbox)
            if problem is not None:
                raise SandboxError(f"the sandbox no longer works: {problem}") from error
            log.warning("an answer broke its sandbox, and gets 0: %s", error)
            return []


def _texts(found: Any) -> list[str]:
    """One text or several, of a field that may be missing."""
    return [found] if isinstance(found, str) else list(found or ())


def program_of(text: str) -> str:
    """The last fenced block of Python in an answer; without one, the answer itself.

    >>> program_of("Like this:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)\\n'
    """
    return next(reversed(FENCE.findall(text)), text)


def same_output(one: str, other: str) -> bool:
    """Whether outputs are equal up to spaces at the end of lines and empty lines at the end.

    >>> same_output("1 \\n2\\n\\n", "1\\n2")
    True
    """
    return _lines(one) == _lines(other)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
