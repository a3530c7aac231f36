"""Files with one row of names and values in each line."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.system.disk import replace_text, writing


class JsonlSink:
    """A file with one JSON object per line, flushed at once. A kill can damage the last line only.

    Each row gets `time`, seconds since the epoch. With `resume_at`, rows of later versions are removed first, so that a
    resumed run has one row per version.
    """

    def __init__(self, path: Path, resume_at: int | None = None) -> None:
        if resume_at is not None and path.exists():
            kept = [row for row in read_rows(path) if row.get("version", 0) <= resume_at]
            replace_text(path, "".join(map(_line, kept)))
        self._path = path
        self._file = path.open("a" if resume_at is not None else "w", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        with writing(self._path):
            self._file.write(_line({"time": round(time.time(), 3), **row}))
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file, if it is there, without a last line that a kill or a full disk damaged. Raises
    ConfigError if a line before the last one is no row."""
    if not path.exists():
        return
    damaged = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if damaged:
                rule = "is no JSON object, and lines follow it"
                raise ConfigError("line", f"{path}:{damaged}", rule, "remove the line, or the file")
            try:
                row = json.loads(line) if line.endswith("\n") else None
            except ValueError:
                row = None
            if isinstance(row, dict):
                yield row
            else:
                damaged = number


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(json_numbers(row), ensure_ascii=False, allow_nan=False) + "\n"


def json_numbers(value: Any) -> Any:
    """`value` with None for numbers that JSON does not have.

    >>> json_numbers({"loss": float("nan"), "parts": [1, float("inf")]})
    {'loss': None, 'parts': [1, None]}
    """
    if isinstance(value, Mapping):
        return {name: json_numbers(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_numbers(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
