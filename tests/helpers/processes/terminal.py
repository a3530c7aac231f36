"""A process on a terminal of its own: what it wrote, and keys that are pressed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
from processes import DEADLINE_S, ENV, family, until

from asyncrl.system.signals import die_with_parent

ROWS, COLUMNS = 50, 160
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CTRL_C = b"\x03"


def _in_terminal() -> None:
    """Between fork and exec: standard input becomes the terminal of the session, which ends with pytest. SIGINT is
    ignored where a script has started pytest in the background; on a terminal it is not."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A process whose terminal is read on a thread; `screen` is all that it wrote, without control sequences."""

    def __init__(self, *words: str, columns: int = COLUMNS) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**ENV, "TERM": "xterm", "COLUMNS": str(columns), "LINES": str(ROWS)},
            start_new_session=True,
            preexec_fn=_in_terminal,
            text=True,
        )
        os.close(slave)
        self._written = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def written(self) -> str:
        return self._written.decode("utf-8", errors="replace")

    @property
    def screen(self) -> str:
        return CONTROL.sub("", self.written)

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def shows(self, *texts: str) -> None:
        """Wait until all of them have been on the screen."""
        for text in texts:
            until(
                lambda text=text: text in self.screen,
                f"{text!r} on a screen: {self.screen[-2000:]}",
                self.process,
            )

    def ends(self) -> int:
        code = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return code

    def close(self) -> None:
        for one in family(self.process.pid):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        os.close(self._master)

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 1 << 16):
                self._written += data
        except OSError:  # the process has ended
            return


@contextmanager
def in_terminal(*words: str, columns: int = COLUMNS) -> Iterator[Terminal]:
    shown = Terminal(*words, columns=columns)
    try:
        yield shown
    finally:
        shown.close()
