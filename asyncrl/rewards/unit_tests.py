"""A reward for programs: runs an answer's Python code against the task's tests, in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config.sections.rules import require
from asyncrl.rewards.sandbox import Isolation, Limits, Sandbox
from asyncrl.types import Task

FENCE = re.compile(r"^```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


class UnitTests:
    """1 if the program passes every test, else 0; with `partial`, the share that it passes.

    tests      the field of task.data with asserts: one Python text or several, run after the program in its namespace
    cases      the field with [{"input": stdin, "output": stdout}, …]; outputs are compared outside the sandbox
    partial    whether an answer that passes only some tests earns their share
    isolation  as in `sandbox.py`, like the limits; wall_s is for all tests of an answer together

    A task needs at least one of the two fields. Raises ConfigError if the machine does not permit the sandbox.
    """

    def __init__(
        self,
        tests: str = "tests",
        cases: str = "cases",
        partial: bool = False,
        isolation: Isolation = "namespaces",
        wall_s: float = 10.0,
        cpu_s: int = 10,
        memory_mb: int = 1024,
        file_mb: int = 16,
        processes: int = 16,
        output_kb: int = 64,
    ) -> None:
        self._tests, self._cases, self._partial = tests, cases, partial
        self._sandbox = Sandbox(Limits(wall_s, cpu_s, memory_mb, file_mb, processes, output_kb), isolation)
        why = self._sandbox.probe()
        require(
            why is None,
            "isolation",
            isolation,
            f"is not to be had on this machine: {why}",
            "permit user namespaces, or set isolation=limits where answers may read and change this user's files",
        )

    def __call__(self, task: Task, text: str) -> float:
        passed = [*self._asserted(task, text), *self._solved(task, text)]
        if not passed:
            raise ValueError(f"task.data has neither {self._tests!r} nor {self._cases!r}")
        share = sum(passed) / len(passed)
        return share if self._partial else float(share == 1)

    def _asserted(self, task: Task, text: str) -> Sequence[bool]:
        found = task.data.get(self._tests, ())
        tests = [found] if isinstance(found, str) else list(found)
        if not tests:
            return ()
        (run,) = self._sandbox.run(program_of(text), tests=tests)
        if not run.well or run.passed is None or len(run.passed) != len(tests):
            return [False] * len(tests)
        return run.passed

    def _solved(self, task: Task, text: str) -> Sequence[bool]:
        cases: Sequence[Mapping[str, Any]] = task.data.get(self._cases, ())
        if not cases:
            return ()
        runs = self._sandbox.run(program_of(text), inputs=[str(case["input"]) for case in cases])
        return [
            run.well and same_output(run.out, str(case["output"]))
            for run, case in zip(runs, cases, strict=True)
        ]


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
