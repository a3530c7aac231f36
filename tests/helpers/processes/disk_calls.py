"""Counts the calls by which a process changes one folder, and at one of them kills the process or fills the disk.

    open (of a new file) · mkdir · write · ftruncate · fsync · rename · unlink · rmdir

Files that are opened for writing, by `open` or `Path.open`, write through a class of Python, so that every write of a
buffer counts. What native code writes by itself (safetensors) does not. Nothing is synced for real, which would take
most of a test's time: the machine goes on (disk_faults.py has one whose power fails).
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import re
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "ASYNCRL_TEST_DISK_CALLS"
"""Environment variable with a `Watch` as JSON, for processes that a test forks (forked.py)."""

NEED_ROOM = {"open", "mkdir", "write"}
KILL, TORN, FULL = "kill", "torn", "full"
"""Faults: SIGKILL before the call, or after half of a write; no room on the disk from the middle of this call on."""


@dataclass(frozen=True)
class Watch:
    """folder: what is watched · notes: a folder beside it, for what happened

    party  the asyncrl command whose calls count, e.g. learner, where the run has several processes
    place  a regular expression: only calls count whose line (`calls`) matches it from its beginning
    fault  at call `at`, counted from 0; empty: none
    """

    folder: str
    notes: str
    party: str = ""
    place: str = ""
    fault: str = ""
    at: int = -1

    @property
    def variables(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @property
    def full(self) -> Path:
        """Is there once the disk is full. Whoever removes it makes room."""
        return Path(self.notes, "full")

    @property
    def struck(self) -> Path:
        """Is there once the fault has happened: it happens once."""
        return Path(self.notes, "struck")

    def calls(self) -> list[str]:
        """'function path' of each call that was counted, in order. Paths begin in the folder."""
        path = Path(self.notes, "calls")
        return path.read_text().splitlines() if path.exists() else []


def install_for(words: Sequence[str], variable: str) -> None:
    """In a forked process, whose command line has these words behind `python`."""
    watch = Watch(**json.loads(variable))
    DiskCalls(watch, counts=list(words[:3]) == ["-m", "asyncrl", watch.party]).install()


class DiskCalls:
    """The calls of this process. counts: whether they are counted; a full disk is full for everybody."""

    def __init__(self, watch: Watch, counts: bool = True) -> None:
        self._watch, self._counts = watch, counts
        self._folder = os.path.realpath(watch.folder)
        self._lock = threading.Lock()
        self._place, self._count, self._process = re.compile(watch.place), 0, os.getpid()
        self._exists, self._write, self._open = os.path.exists, os.write, os.open
        self._notes = os.open(Path(watch.notes, "calls"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def install(self) -> None:
        """For the rest of this process's life."""
        calls = self
        for name in ("replace", "rename", "mkdir", "unlink", "remove", "rmdir"):
            setattr(os, name, self._of_path(getattr(os, name), "rename" if name == "replace" else name))
        os.ftruncate = self._of_file(os.ftruncate, "ftruncate")  # type: ignore[assignment]
        os.fsync = self._of_file(lambda fd: None, "fsync")  # type: ignore[assignment]
        os.write = self._writing(os.write, lambda data: data[: len(data) // 2])  # type: ignore[assignment]
        os.pwritev = self._writing(os.pwritev, lambda parts: parts[: len(parts) // 2])  # type: ignore[assignment]
        os.open = self._opening(os.open)  # type: ignore[assignment]

        class CountedFile(io.FileIO):
            def write(self, data: Any) -> int:
                view = memoryview(data).cast("B")
                half = view[: len(view) // 2]
                write = super().write
                return int(
                    calls._happens("write", calls._path_of(self), lambda: write(view), lambda: write(half))
                )

        opened = _counted_open(builtins.open, CountedFile, self._opens)
        builtins.open = io.open = opened  # type: ignore[assignment]

    # ------------------------------------------------------------------ the patched functions

    def _of_path(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def patched(path: Any, *args: Any, **more: Any) -> Any:
            full = os.fspath(path)
            if (at := more.get("dir_fd", more.get("src_dir_fd"))) is not None:
                full = os.path.join(self._path_of(at), full)
            return self._happens(name, full, lambda: call(path, *args, **more))

        return patched

    def _of_file(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        return lambda fd, *args: self._happens(name, self._path_of(fd), lambda: call(fd, *args))

    def _writing(self, call: Callable[..., int], half: Callable[[Any], Any]) -> Callable[..., int]:
        def patched(fd: int, data: Any, *args: Any) -> int:
            path = self._path_of(fd)
            return int(
                self._happens(
                    "write", path, lambda: call(fd, data, *args), lambda: call(fd, half(data), *args)
                )
            )

        return patched

    def _opening(self, call: Callable[..., int]) -> Callable[..., int]:
        def patched(path: Any, flags: int, *args: Any, **more: Any) -> int:
            if flags & os.O_CREAT:
                self._opens(path)
            return call(path, flags, *args, **more)

        return patched

    def _opens(self, path: Any) -> None:
        """A file is opened that may have to be made."""
        if isinstance(path, int):
            return
        name = os.fspath(path)
        if not self._exists(name):
            self._happens("open", name, lambda: None)

    def _path_of(self, fd: Any) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{fd if isinstance(fd, int) else fd.fileno()}")
        except OSError:
            return ""

    # ------------------------------------------------------------------ one call

    def _happens(
        self, name: str, path: Any, call: Callable[[], Any], half: Callable[[], Any] | None = None
    ) -> Any:
        full = os.path.abspath(os.fsdecode(path))
        if not full.startswith(self._folder + os.sep):
            return call()
        if self._counts and self._strikes(name, full[len(self._folder) + 1 :]):
            return self._strike(name, full, call, half)
        if name in NEED_ROOM and self._exists(self._watch.full):
            raise _no_room(name, full)
        return call()

    def _strikes(self, name: str, path: str) -> bool:
        """Note the call, unless it is of a child that was forked from this process. Whether the fault happens now."""
        line = f"{name} {path}"
        if os.getpid() != self._process or not self._place.match(line):
            return False
        with self._lock:
            number, self._count = self._count, self._count + 1
            self._write(self._notes, f"{line}\n".encode())
            if number != self._watch.at or self._exists(self._watch.struck):
                return False
            os.close(self._open(self._watch.struck, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True

    def _strike(self, name: str, path: str, call: Callable[[], Any], half: Callable[[], Any] | None) -> Any:
        if self._watch.fault == FULL:
            os.close(self._open(self._watch.full, os.O_CREAT | os.O_WRONLY))
            if half is not None:
                half()
            if name in NEED_ROOM:
                raise _no_room(name, path)
            return call()
        try:
            return (half or call)() if self._watch.fault == TORN else None
        finally:
            os.kill(os.getpid(), signal.SIGKILL)


def _no_room(name: str, path: str) -> OSError:
    """As the system raises it: a write does not name its file."""
    named = () if name == "write" else (path,)
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *named)


def _counted_open(
    plain: Callable[..., Any], file_class: type[io.FileIO], opens: Callable[[Any], None]
) -> Callable[..., Any]:
    """The built-in `open`, with this class below the buffers of files that are written."""

    def opened(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if not set(mode) & set("wax+"):
            return plain(file, mode, buffering, encoding, errors, newline, closefd, opener)
        opens(file)
        raw = file_class(file, "".join(sorted(set(mode) - set("bt"))), closefd, opener)
        if buffering == 0:
            return raw
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffer
        return io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)

    return opened


# ---------------------------------------------------------------------- work in a child of the test


Work = Callable[[Callable[[str], None]], None]
"""Changes the folder. It gets a function that reports what is done, as the caller of the work is told it."""


def watched(work: Work, watch: Watch) -> tuple[int, list[str]]:
    """Do the work in a forked process whose calls are counted. Returns its exit code (a signal as a negative number)
    and what it has reported; the last report of work that raised an OSError is its text, with exit code 28."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            DiskCalls(watch).install()
            try:
                work(lambda line: (os.write(writing, f"{line}\n".encode()), None)[1])
                code = 0
            except OSError as error:
                os.write(writing, f"{error}\n".encode())
                code = errno.ENOSPC
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        reports = pipe.read().splitlines()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), reports
