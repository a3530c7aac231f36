"""Signals that stop a process in order, and the one that follows the end of its parent; who becomes a parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, and SIGHUP of a terminal that closes, but for those that the process was started to ignore: as nohup
    starts it, and as the queue of a job that a scheduler may signal as a whole."""
    both = (signal.SIGTERM, signal.SIGHUP)
    return tuple(number for number in both if signal.getsignal(number) != signal.SIG_IGN)


def die_with_parent() -> None:
    """Make the kernel (Linux) kill this process when the thread that started it ends."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with(launcher: int) -> Callable[[], None]:
    """Return a function to run between fork and exec of a child: the kernel (Linux) kills it when its launcher ends."""

    def between_fork_and_exec() -> None:
        die_with_parent()
        if os.getppid() != launcher:  # it died before the request was in place
            os._exit(1)

    return between_fork_and_exec


@contextmanager
def inheriting() -> Iterator[None]:
    """Inside, the kernel (Linux) makes this process the parent of those below it whose own parent ends. One thread of
    this process may be inside at a time."""
    assert _LIBC is not None
    before = ctypes.c_int()
    _LIBC.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, before.value)
