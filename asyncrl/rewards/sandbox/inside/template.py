"""Processes of one program, one after another, which know the program and nothing else.

    judge ── "start" ──▸ template ── fork ──▸ program's process
          ◂── its id ──                           │
          ◂── its status ── at its end            │
          ◂═══════════════ requests, replies ═════┘

The template is forked before the judge reads the tests, so neither it nor what it forks has them in memory. The program
may kill the template: then no further process of it starts, and its tests fail.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import time
from typing import Any

from . import frames, program
from .system import exit_after

STATUS = struct.Struct("i")
LAST_S = 10.0
"""For the end of a process that was killed."""


class Template:
    """epoch: the number of processes started so far. status: of the last one, once it has ended."""

    def __init__(self, text: str, limits: dict[str, Any], tests: int) -> None:
        self._requests = os.pipe()
        self._replies = os.pipe()
        orders, self._orders = os.pipe()
        self._news, news = os.pipe()
        self.epoch = 0
        self.status: int | None = None
        self._pid: int | None = None
        if os.fork() == 0:
            for fd in (self._orders, self._news, self._requests[1], self._replies[0]):
                os.close(fd)
            null = os.open("/dev/null", os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)  # not the pipe for the result
            exit_after(
                lambda: _forking(text, limits, tests, orders, news, self._requests[0], self._replies[1])
            )
        for fd in (orders, news, self._replies[1]):
            os.close(fd)
        for fd in (*self._requests, self._replies[0]):
            os.set_blocking(fd, False)

    def start(self, deadline: float) -> bool:
        """Start a process. Returns whether the program ran to its end; if it failed, `status` is its status."""
        self.status, self.epoch = None, self.epoch + 1
        try:
            os.write(self._orders, b"!")
            self._pid = self._told(deadline)
            ready = frames.received(self._replies[0], deadline, self._news)
        except (frames.FrameError, OSError):
            self._ended()
            return False
        if not isinstance(ready, list) or ready[:1] != ["ready"] or len(ready) != 2:
            return False
        self.status = ready[1] if type(ready[1]) is int else 1
        return self.status == 0

    def exchange(self, request: bytes, deadline: float) -> Any:
        """The reply to a request. Raises FrameError."""
        frames.send(self._requests[1], request, deadline, self._news)
        return frames.received(self._replies[0], deadline, self._news)

    def kill(self) -> int:
        """End the process and all that it started. Returns its status, or minus the signal's number."""
        if self._pid is not None:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(self._pid, signal.SIGKILL)
            with contextlib.suppress(frames.FrameError):
                self._told(time.monotonic() + LAST_S)
            self._pid = None
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # its own children are this process's now
        frames.discard_unread(self._requests[0])
        frames.discard_unread(self._replies[0])
        return -signal.SIGKILL if self.status is None else self.status

    def _ended(self) -> None:
        """Take the status of a process that has ended by itself, if it has."""
        if self._pid is not None and select.select([self._news], [], [], 0)[0]:
            with contextlib.suppress(frames.FrameError):
                self.status = self._told(time.monotonic() + LAST_S)
            self._pid = None

    def _told(self, deadline: float) -> int:
        """The next number from the template."""
        if not select.select([self._news], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise frames.FrameError("the template does not answer")
        raw = os.read(self._news, STATUS.size)
        if len(raw) != STATUS.size:
            raise frames.FrameError("the template is gone")
        return int(STATUS.unpack(raw)[0])


def _forking(
    text: str, limits: dict[str, Any], tests: int, orders: int, news: int, requests: int, replies: int
) -> int:
    """Fork a process for each order, and wait for its end."""
    while os.read(orders, 1):
        pid = os.fork()
        if pid == 0:
            above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in (requests, replies)]
            for fd, place in zip(above, (program.REQUESTS, program.REPLIES), strict=True):
                os.dup2(fd, place)
            exit_after(lambda: program.serve_tests(text, limits, tests))
        os.write(news, STATUS.pack(pid))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(news, STATUS.pack(status))
    return 0
