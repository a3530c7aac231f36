"""The JSONL files of a run folder, read as they grow: rows of metrics.jsonl and of other files with a row a line."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.system.disk import open_to_read

log = logging.getLogger(__name__)

Row = dict[str, Any]

METRICS, ROLLOUTS = "metrics.jsonl", "rollouts.jsonl"
EVALUATION = "eval/"
"""Begins the keys of the scores of an evaluation."""

STEP_S = "perf/step_s"
"""A key that the row of each version has, and that of no evaluation."""


PIECE = 1 << 24
"""Bytes of a file that are read at once. A longer line is no row."""

LARGEST = 1e100
"""Larger numbers are taken for this one, so that sums of their squares are numbers, too."""


class RowTail:
    """Rows of a JSONL file as they are appended. A file that was replaced is read from its start.

    replaced: how often it was · damaged: lines of the file that are no rows
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._inode = path, 0, 0
        self.replaced = self.damaged = 0
        self._readable = True

    def new_rows(self) -> list[Row]:
        """Those of a file that cannot be read are none, with one warning."""
        return [row for row, _ in self.sized_rows()]

    def sized_rows(self) -> Iterator[tuple[Row, int]]:
        """As `new_rows`, one by one, each with the bytes of its line."""
        try:
            with open_to_read(self._path) as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self.replaced += self._inode != 0
                    self._inode, self._offset, self.damaged = stat.st_ino, 0, 0
                file.seek(self._offset)
                while lines := _whole_lines(file.read(PIECE)):
                    self._offset += len(lines)
                    file.seek(self._offset)
                    for line in lines.splitlines():
                        if (row := _row(line)) is None:
                            self.damaged += 1
                        elif row:
                            yield row, len(line)
        except FileNotFoundError:
            pass
        except OSError as error:
            if self._readable:
                log.warning("%s is not read: %s", self._path, error)
            self._readable = False


class NewestRows:
    """The newest rows of a file: at most so many, with at most so many bytes of lines."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._rows: deque[tuple[Row, int]] = deque()

    def append(self, row: Row, nbytes: int) -> None:
        self._rows.append((row, nbytes))
        self._bytes += nbytes
        while len(self._rows) > self._most or self._bytes > self._most_bytes:
            self._bytes -= self._rows.popleft()[1]

    def clear(self) -> None:
        self._rows.clear()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return (row for row, _ in self._rows)

    def newest(self) -> Iterator[tuple[Row, int]]:
        """With the bytes of each, from the newest on."""
        return reversed(self._rows)


class MetricRows:
    """The rows of metrics.jsonl, those of versions and those of evaluations apart, each in the order of its versions.

    A resumed learner writes rows of versions anew; they take the place of the earlier ones.
    """

    def __init__(self, run_folder: Path) -> None:
        self._tail = RowTail(run_folder / METRICS)
        self._replaced = 0
        self.versions: list[Row] = []
        self.evaluations: list[Row] = []

    @property
    def damaged(self) -> int:
        """Lines that are no rows."""
        return self._tail.damaged

    def read(self) -> bool:
        """Take in new rows; whether there were any."""
        rows = self._tail.new_rows()
        if self._tail.replaced != self._replaced:
            self._replaced = self._tail.replaced
            self.versions, self.evaluations = [], []
        for row in rows:
            if isinstance(version := row.get("version"), int):
                evaluation = any(key.startswith(EVALUATION) for key in row)
                _insert(self.evaluations if evaluation else self.versions, version, row)
        return bool(rows)

    def thin(self, most: int) -> None:
        """Forget every second row of the older half, until there are `most`: of versions, and of evaluations."""
        for rows in (self.versions, self.evaluations):
            while len(rows) > max(most, 3):
                del rows[1 : len(rows) // 2 : 2]


def series(rows: Sequence[Row], key: str) -> list[tuple[int, float]]:
    """(version, value) of each row that has a finite number under `key`.

    >>> series([{"version": 1, "a": 0.5}, {"version": 2, "a": None}, {"version": 3}], "a")
    [(1, 0.5)]
    """
    return [(row["version"], value) for row in rows if (value := number(row, key)) is not None]


def number(row: Mapping[str, Any], key: str) -> float | None:
    """The finite number of a row under `key`, as one that can be added up; None if there is none.

    >>> number({"a": 10**400}, "a"), number({"a": float("inf")}, "a")
    (1e+100, None)
    """
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return float(max(-LARGEST, min(LARGEST, value)))


def _insert(rows: list[Row], version: int, row: Row) -> None:
    """In the order of the versions, which is nearly that of arrival. A second row of a version replaces the first."""
    at = len(rows)
    while at and rows[at - 1]["version"] > version:
        at -= 1
    if at and rows[at - 1]["version"] == version:
        rows[at - 1] = row
    else:
        rows.insert(at, row)


def _row(line: bytes) -> Row | None:
    """The row of a line; None for a damaged line, which must not end the run that is shown."""
    try:
        return _decode(line)
    except (ValueError, RecursionError):
        return None


def _whole_lines(piece: bytes) -> bytes:
    """Those of a piece of a file; all of it where a line is longer, whose pieces are no rows."""
    return piece if len(piece) == PIECE and b"\n" not in piece else piece[: piece.rfind(b"\n") + 1]


_decode = msgspec.json.Decoder(dict[str, Any]).decode
