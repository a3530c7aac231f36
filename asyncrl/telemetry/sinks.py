"""Where metrics go. A sink takes one flat row of names and values at a time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from asyncrl.disk import writing


class Sink(Protocol):
    def write(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object a line, flushed at once: readable while the run goes on, whole but for the last line after a
    kill.

    Each row gets `time`, seconds since the epoch. With `resume_at`, rows of a version above it are cut off
    first, so that a resumed run leaves one row per version.
    """

    def __init__(self, path: Path, resume_at: int | None = None) -> None:
        if resume_at is not None and path.exists():
            _keep_rows_up_to(path, resume_at)
        self._path = path
        self._file = path.open("a" if resume_at is not None else "w", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        with writing(self._path):
            self._file.write(_line({"time": round(time.time(), 3), **row}))
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class Sinks:
    """Several as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def write(self, row: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(row)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file; a half-written last line (a kill, a full disk) is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def _keep_rows_up_to(path: Path, version: int) -> None:
    kept = [row for row in read_rows(path) if row.get("version", 0) <= version]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(map(_line, kept)), encoding="utf-8")
    os.replace(partial, path)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
