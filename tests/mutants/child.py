"""pytest in a fork of this process, on a copy of the tree."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.patches import ROOT

PYTEST = ("-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", "--timeout=60")


@dataclass(slots=True)
class Child:
    """A process group of its own: pytest, and what its tests start."""

    pid: int
    log: Path
    began: float
    limit_s: float

    @staticmethod
    def start(copy: Path, tests: Sequence[str], limit_s: float) -> Child:
        """Run these quick tests in `copy`, at most `limit_s`."""
        log = copy.with_suffix(".log")
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            _pytest(copy, tests, log)
        return Child(pid, log, time.monotonic(), limit_s)

    def poll(self) -> int | None:
        """Exit code of pytest, -1 once it has run too long, None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self._kill_group()  # what the tests have left behind
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() - self.began < self.limit_s:
            return None
        self.kill()
        return -1

    def kill(self) -> None:
        """End it, whatever it does."""
        self._kill_group()
        os.waitpid(self.pid, 0)

    def output(self, characters: int) -> str:
        """The end of what it has printed."""
        return self.log.read_text(errors="replace")[-characters:]

    def failed(self) -> str:
        """The first test that failed, by name."""
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", self.output(10_000), re.MULTILINE)
        return found[1] if found else ""

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _pytest(copy: Path, tests: Sequence[str], log: Path) -> None:
    """In the child: nothing of the parent's tree is imported from here on."""
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(copy)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.path[:] = [str(copy), *(path for path in sys.path if path and Path(path) != ROOT)]
        os.environ["PYTHONPATH"] = str(copy)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        import pytest

        code = int(pytest.main([*PYTEST, *tests]))
    finally:
        os._exit(code)
