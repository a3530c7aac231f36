"""The file of one process's trace: whole lines at its end, half of it removed when it is full; and its reader.

    append ──▸ <process>.jsonl ──full──▸ <process>.earlier.jsonl (the one before is removed) ──▸ TraceTail: in order

A file is known again by the beginning of its first line, which has the time at which it was begun: the number of a
removed file is soon that of another.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from asyncrl.system.disk import open_to_read

log = logging.getLogger(__name__)

FOLDER = "trace"
SUFFIX = ".jsonl"
EARLIER = ".earlier"
"""Between the name of a process and the suffix: the file before this one."""

Write = Callable[[int, bytes], int]
"""As `os.write`."""

KNOWN_BY = 64
"""Bytes of a first line by which a file is known."""


class TraceFile:
    """Appends lines, each at once; a kill can damage the last one only. Used by one thread at a time.

    An error of the disk ends it, with one warning. Raises OSError if the file cannot be opened.

    most_bytes: of both files · head: the first lines of each file that is begun because the one before is full · write:
    `holding_write`, or `os.write` where other threads must go on while a disk hangs
    """

    def __init__(
        self,
        folder: Path,
        process: str,
        most_bytes: int,
        head: Callable[[], Sequence[bytes]],
        write: Write = os.write,
    ) -> None:
        self.path = folder / f"{process}{SUFFIX}"
        self._earlier = earlier(self.path)
        self._most, self._head, self._system_write = most_bytes // 2, head, write
        self._file, self._bytes = -1, 0
        self._open()
        if self._bytes and os.pread(self._file, 1, self._bytes - 1) != b"\n":
            os.write(self._file, b"\n")  # a process that was killed left half a line

    @property
    def ended(self) -> bool:
        return self._file < 0

    def append(self, line: bytes) -> None:
        """line: one or more of them, each with its newline"""
        if self._file < 0:
            return
        try:
            if self._bytes + len(line) > self._most:
                self._rotate()
            self._write(line)
        except OSError as error:
            log.warning("the trace %s ends here: %s", self.path, error)
            self.close()

    def close(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            with suppress(OSError):
                os.close(file)

    def _write(self, line: bytes) -> None:
        written = self._system_write(self._file, line)
        self._bytes += written
        if written < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _rotate(self) -> None:
        os.replace(self.path, self._earlier)
        self.close()
        self._open()
        for line in self._head():
            self._write(line)

    def _open(self) -> None:
        """A process that was started again goes on in the file of the one before."""
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._bytes = os.fstat(self._file).st_size


def _without_handover() -> Write:
    """`os.write` gives the interpreter away: where another thread computes in Python, each call waits up to 5 ms to
    have it back (sys.getswitchinterval), a thousand times as long as it writes."""
    try:
        system = ctypes.PyDLL(None, use_errno=True).write
    except (AttributeError, OSError, TypeError):
        return os.write
    system.argtypes, system.restype = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_ssize_t

    def write(file: int, data: bytes) -> int:
        written: int = system(file, data, len(data))
        if written < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return written

    return write


holding_write = _without_handover()
"""As `os.write`, for a few bytes; the other threads of the process stand still meanwhile."""


class TraceTail:
    """Reads the lines of a trace as they are appended, and goes on in the next file where one is full.

    missed: how often a file was removed that may have had lines which were not read
    """

    def __init__(self, path: Path) -> None:
        self.path, self.missed = path, 0
        self._known, self._at = b"", 0  # the file that is read, and how far
        self._has_read = self._refused = False

    def read(self, most: int = 1 << 30) -> bytes:
        """Whole lines that were appended since, at most so many bytes; empty if there are none."""
        for path in (self.path, earlier(self.path)) if self._known else ():
            first, lines = self._lines(path, self._at, most)
            if first == self._known:
                self._at += len(lines)
                return lines or (b"" if path == self.path else self._next(most))
        lines = self._next(most)
        self.missed += bool(lines) and self._has_read
        self._has_read |= bool(lines)
        return lines

    def _next(self, most: int) -> bytes:
        """The lines of the oldest file behind the one that was read."""
        before = earlier(self.path)
        while True:
            first, lines = oldest, _ = self._lines(before, 0, most)
            if first in (b"", self._known):
                first, lines = self._lines(self.path, 0, most)
            if self._lines(before, 0, 0)[0] == oldest:
                break  # no file was replaced meanwhile
        if first in (b"", self._known):
            return b""
        self._known, self._at = first, len(lines)
        return lines

    def _lines(self, path: Path, at: int, most: int) -> tuple[bytes, bytes]:
        """(the beginning of the first line of this file, whole lines from `at` on); empty if there are none."""
        try:
            with open_to_read(path) as file:
                first, newline, _ = file.read(KNOWN_BY).partition(b"\n")
                file.seek(at)
                data = file.read(most)
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and not self._refused:
                log.warning("%s is not read: %s", path, error)
                self._refused = True
            return b"", b""
        if not newline and len(first) < KNOWN_BY:
            return b"", b""  # its first line is still being written
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and len(data) == most:  # a line longer than that: its pieces are no rows
            return first, data
        return first, whole


def earlier(path: Path) -> Path:
    """The file before this one.

    >>> str(earlier(Path("trace/generator-0.jsonl")))
    'trace/generator-0.earlier.jsonl'
    """
    return path.with_name(f"{path.name.removesuffix(SUFFIX)}{EARLIER}{SUFFIX}")
