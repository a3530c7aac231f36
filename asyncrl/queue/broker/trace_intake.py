"""Traces of processes that do not share the run folder: their rows come with requests and go into files of the queue's.

    handler ── at once, within BUFFER_BYTES ──▸ buffer ──▸ writer thread ──▸ RUN/trace/<process>.jsonl

The broker never waits for the disk here: a sender whose rows find no room sends them again later. Bounded are the rows
of a request (`TRACE_BYTES`), the buffer, the files of each process and their number; a disk that is nearly full gets no
new file.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from asyncrl.errors import RefusedError, WireError
from asyncrl.telemetry.trace_file import EARLIER, TraceFile

log = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 22
"""Rows that wait for the writer."""

MOST_PROCESSES = 1024
ROOM_BYTES = 1 << 30
"""A disk with less room gets no further file."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
OWN = frozenset({"queue", "launcher"})
"""Processes of the queue's machine."""

TOP = ("process", "clock")
"""Rows by a key of theirs that a further file begins with, in this order."""

MARK = re.compile(r"queue-[0-9a-f]{16}")

CLOSE_S = 2.0


class TraceIntake:
    """folder: of the queue's traces, which is there · most_bytes: of the files of one process

    mark: the name of a file in the folder, new with each queue; who sees it shares the folder
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self._most = folder, most_bytes
        for old in folder.iterdir():
            if MARK.fullmatch(old.name):
                old.unlink(missing_ok=True)
        self.mark = f"queue-{secrets.token_hex(8)}"
        (folder / self.mark).touch()
        self._names: set[str] = set()
        self._files: dict[str, TraceFile | None] = {}  # the writer's; None: it has ended
        self._tops: dict[str, dict[str, Any]] = {}  # the writer's: rows that begin a further file
        self._buffer: SimpleQueue[tuple[str, bytes] | None] = SimpleQueue()
        self._waiting, self._lock = 0, threading.Lock()
        self._thread = threading.Thread(target=self._write_all, name="traces", daemon=True)
        self._thread.start()

    def take(self, process: str, rows: bytes) -> bool:
        """Take rows, whole lines, to be written; False: there is no room for them now. Raises RefusedError("full") for
        one process too many, and WireError for a name or rows that are none."""
        if not NAME.fullmatch(process) or EARLIER in process or process in OWN:
            raise WireError(f"trace: {process!r:.100} is no name of a process elsewhere")
        if not rows.endswith(b"\n"):
            raise WireError("trace: rows are lines")
        if process not in self._names and len(self._names) >= MOST_PROCESSES:
            raise RefusedError("full", f"there are traces of {MOST_PROCESSES} processes already")
        with self._lock:
            if self._waiting + len(rows) > BUFFER_BYTES:
                return False
            self._waiting += len(rows)
        self._names.add(process)
        self._buffer.put((process, rows))
        return True

    def close(self) -> None:
        """Write what is there; a disk that hangs is not waited for."""
        self._buffer.put(None)
        self._thread.join(CLOSE_S)
        with suppress(OSError):
            (self._folder / self.mark).unlink()

    # ------------------------------------------------------------------ the writer's thread

    def _write_all(self) -> None:
        while (taken := self._buffer.get()) is not None:
            process, rows = taken
            if (file := self._file(process)) is not None:
                self._remember(process, rows)
                file.append(rows)
            with self._lock:
                self._waiting -= len(rows)
        for file in self._files.values():
            if file is not None:
                file.close()

    def _file(self, process: str) -> TraceFile | None:
        if process not in self._files:
            self._files[process] = self._opened(process)
        return self._files[process]

    def _opened(self, process: str) -> TraceFile | None:
        tops = self._tops[process] = dict[str, Any]()
        try:
            if (free := shutil.disk_usage(self._folder).free) < ROOM_BYTES:
                raise OSError(f"{free} bytes are free, {ROOM_BYTES} are left for the run")
            return TraceFile(self._folder, process, self._most, partial(_head, tops))
        except OSError as error:
            log.warning("the trace of %s is not kept: %s", process, error)
            return None

    def _remember(self, process: str, rows: bytes) -> None:
        """The newest rows that a reader needs who sees a later file alone: who it is, and its clock."""
        for key in TOP:
            at = rows.rfind(f'"{key}":'.encode())
            line = rows[rows.rfind(b"\n", 0, at) + 1 : rows.find(b"\n", at)] if at >= 0 else b""
            with suppress(msgspec.DecodeError, RecursionError):
                row = _decode(line)
                if key in row and "event" not in row:
                    self._tops[process][key] = row


def _head(tops: Mapping[str, Any]) -> list[bytes]:
    """The moment comes first: a file is known by its beginning."""
    now = time.time()
    return [msgspec.json.encode({"continues": now, **tops[key]}) + b"\n" for key in TOP if key in tops]


_decode = msgspec.json.Decoder(dict[str, Any]).decode
