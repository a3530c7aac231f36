"""Where metrics go. A sink takes one flat row of names and values at a time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol


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
        self._file = path.open("a" if resume_at is not None else "w", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"time": round(time.time(), 3), **row}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


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
    partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(partial, path)
