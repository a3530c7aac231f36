"""A reward for mathematics: the answer is right if its value equals that of the task's answer.

    reward thread ── {"gold", "text"} ──▸ an idle process of `math_child.py`
                  ◂── right, the answer ──         not in wall_s: killed, and the answer is wrong

The library `math-verify` limits its time by signals, which work only in a main thread and not in C code. A separate
process can be killed.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from asyncrl.config.rules import require
from asyncrl.system.packages import check_package
from asyncrl.types import Scored, Task

CHILD = Path(__file__).with_name("math_child.py")
KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""The variables that a process with texts of the model gets: the environment may hold keys."""
START_S = 60.0
"""Time for the import of sympy on a busy machine."""


class MathVerify:
    """1 if the last formula or number of the text equals the task's answer, by the library `math-verify`.

    answer     the field of task.data: a number or LaTeX, with or without $ or \\boxed
    wall_s     time for one answer; one that takes longer is wrong
    memory_mb  memory of one process
    """

    def __init__(self, answer: str = "answer", wall_s: float = 5.0, memory_mb: int = 2048) -> None:
        require(wall_s > 0, "wall_s", wall_s, "must be above 0", "set wall_s=5")
        require(memory_mb >= 256, "memory_mb", memory_mb, "sympy alone needs 256", "set memory_mb=2048")
        check_package("math_verify", "math", "function", "asyncrl.rewards:MathVerify", "math-verify")
        self._answer, self._wall_s, self._memory_mb = answer, wall_s, memory_mb
        self._idle: list[_Child] = []
        self._closed, self._changing = False, threading.Lock()

    def __call__(self, task: Task, text: str) -> Scored:
        reply = self._compared({"gold": str(task.data[self._answer]), "text": text})
        if "error" in reply:
            raise ValueError(reply["error"])
        return Scored(float(reply["right"]), answer=reply["answer"])

    def close(self) -> None:
        with self._changing:
            self._closed = True
            for child in self._idle:
                child.kill()

    def _compared(self, question: dict[str, str]) -> dict[str, Any]:
        with self._changing:
            child = self._idle.pop() if self._idle else None
        child = child or _Child(self._wall_s, self._memory_mb)
        try:
            reply = child.request(question, self._wall_s)
        except (TimeoutError, EOFError):  # too slow, or out of memory
            child.kill()
            return {"right": False, "answer": None}
        except BaseException:
            child.kill()
            raise
        with self._changing:
            if self._closed:
                child.kill()
            else:
                self._idle.append(child)
        return reply


class _Child:
    """A process that answers one question at a time."""

    def __init__(self, wall_s: float, memory_mb: int) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)  # this process's packages
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), str(math.ceil(wall_s) + 1), str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**kept, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # no Ctrl-C of its parent's terminal
        )
        try:
            self._line(START_S)  # "ready"
        except (TimeoutError, EOFError) as error:
            self.kill()
            raise RuntimeError(f"the process for math-verify did not start: {error}") from None

    def request(self, question: dict[str, str], wall_s: float) -> dict[str, Any]:
        """Raises TimeoutError, or EOFError if the process is dead."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EOFError("it is dead") from None
        reply: dict[str, Any] = json.loads(self._line(wall_s))
        return reply

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self, wall_s: float) -> bytes:
        assert self._process.stdout is not None
        pipe, line, deadline = self._process.stdout.fileno(), b"", time.monotonic() + wall_s
        while not line.endswith(b"\n"):
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"no answer after {wall_s} s")
            piece = os.read(pipe, 1 << 16)
            if not piece:
                raise EOFError("it is dead")
            line += piece
        return line
