"""System calls that Python's standard library does not have, and pieces of work for forked processes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int, more: Any = 0) -> None:
    checked(libc.prctl(option, value, more, 0, 0), f"prctl {option}")


def checked(result: int, what: str) -> None:
    """Raises OSError if a system call returned a negative number."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: {what}")


def write_text(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def write_all(fd: int, raw: bytes) -> None:
    while raw:
        raw = raw[os.write(fd, raw) :]


def exit_after(work: Callable[[], int]) -> NoReturn:
    """Run `work` and end a forked process, without unwinding its parent's frames."""
    status = 120
    try:
        status = work()
    except BaseException:
        import traceback  # seldom needed, and every start of a sandbox would pay for it

        traceback.print_exc()
    finally:
        os._exit(status & 0xFF)
