"""A Python interpreter for the policy, after ReTool (arXiv 2504.11536): its code runs in the sandbox.

    The sum is                     in a fenced block, or by a call of the tool `python`
    ```python
    print(sum(range(0, 412, 3)))
    ```
    28359                          what the code prints, with the end of the traceback if it fails

A turn without code is the answer. Each run begins with a new interpreter: nothing is kept from the run before.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import lru_cache
from typing import Any

from asyncrl.generator.agents.env import Action, Observation, ToolEnvironment
from asyncrl.generator.agents.tool_formats import ToolCall
from asyncrl.generator.agents.tools import Toolbox
from asyncrl.rewards.sandbox import Limits, ProgramRun, Sandbox, sandbox_named
from asyncrl.rewards.unit_tests import FENCE

REPORTING = """\
import sys, traceback
try:
    exec(compile({code!r}, "<code>", "exec"), {{"__name__": "__main__"}})
except BaseException as error:
    if not isinstance(error, SystemExit):
        print("".join(traceback.format_exception(error)[-{lines}:]).strip())
        sys.exit(1)
"""
"""The sandbox gives stdout alone, so a traceback goes there."""
ERROR_LINES = 2

DEADLINE_S = 30.0
"""Time beyond that of a run, for the sandbox."""


class Interpreter:
    """Runs code in a sandbox of `limits`. Raises ConfigError if this machine permits none."""

    def __init__(self, sandbox: str, limits: Limits) -> None:
        self._sandbox: Sandbox = sandbox_named(sandbox, limits)
        self._limits = limits

    def python(self, code: str) -> str:
        """Run Python code and return what it prints.

        Args:
            code: the whole program; nothing is kept between two runs
        """
        (run,) = self._sandbox.run(REPORTING.format(code=code, lines=ERROR_LINES))
        return f"{run.out.strip()}{self._problem(run)}".strip() or "no output"

    def _problem(self, run: ProgramRun) -> str:
        if run.ended == "time":
            return f"\nError: it took longer than {self._limits.wall_s:g} s."
        if run.ended == "output":
            return f"\nError: it printed more than {self._limits.output_kb} kB."
        return f"\nError: signal {-run.code} ended it." if run.code < 0 else ""


class PythonTool(ToolEnvironment):
    """Answers turns with code, in fenced blocks or calls.

    Args:
        sandbox: auto, bubblewrap, namespaces, or a class of your own (see `UnitTests`).
        wall_s: Deadline of a run.
        memory_mb: Memory of a run.
        workers: Runs at once in one generator.
        role: Role of the answers.
    """

    def __init__(
        self,
        sandbox: str = "auto",
        wall_s: float = 5.0,
        memory_mb: int = 512,
        workers: int = 4,
        role: str = "tool",
    ) -> None:
        limits = Limits(wall_s=wall_s, total_s=wall_s, memory_mb=memory_mb)
        super().__init__(_toolbox(asyncio.get_running_loop(), sandbox, limits, workers), role)
        self.stateless = True

    @classmethod
    def check(cls, sandbox: str = "auto", **options: Any) -> None:
        sandbox_named(sandbox, Limits())

    async def step(self, action: Action) -> Observation:
        blocks = () if action.calls else FENCE.findall(f"{action.text}\n")
        calls = action.calls or tuple(ToolCall("python", {"code": block}) for block in blocks)
        return await super().step(replace(action, calls=calls))


@lru_cache(maxsize=4)
def _toolbox(loop: asyncio.AbstractEventLoop, sandbox: str, limits: Limits, workers: int) -> Toolbox:
    """One toolbox for all rollouts of an event loop, so that `workers` limits them together."""
    return Toolbox([Interpreter(sandbox, limits).python], limits.total_s + DEADLINE_S, workers)
