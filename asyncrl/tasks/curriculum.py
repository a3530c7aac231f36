"""A curriculum: from its second epoch on, tasks of a source that are solved rest, and some of them come again.

    generators ── mean reward of each group ──▸ queue ──▸ feeder: take ──▸ RUN/curriculum.jsonl
                                                            └── draw: who rests in the next epoch ──▸ the same file

    {"about": …}        the first row: the source, its size and its order
    {"scores": […]}     ordinal and score of groups
    {"epoch": n, …}     the rows that rest now and did not in the epoch before, and those that do not rest any more

`task_at` is a pure function of the ordinal and of that file, which has an epoch before any of its tasks is submitted:
a run that is rewound, resumed or made again gets the same tasks.

Source: No-Positive-Resampling, ScaleRL, arXiv 2510.13786 (solved tasks never come again there: revisit 0).
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO

import numpy as np

from asyncrl.config.sections.tasks import CurriculumConfig
from asyncrl.counter_rng import uniform
from asyncrl.errors import TaskError
from asyncrl.tasks.stream import SequenceStream
from asyncrl.types import Array, Task

FILE = "curriculum.jsonl"

REVISITS = 7
"""Sets the draws of who comes again apart from others of `run.seed`."""

LEAST_TASKS = 64
"""Of an epoch: solved tasks come again before there are fewer, as far as the source has so many."""

OrdinalScore = tuple[int, float]
"""Ordinal of a task, and the mean reward of a group of it."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """first: ordinal of its first task · rows: of the source, in the epoch's order"""

    first: int
    rows: Array


class CurriculumStream:
    """A stream of epochs, each known once it is drawn or read; the first one has all tasks.

    about: what tells this stream from another · fsync: whether an epoch is on the disk before its tasks are submitted
    """

    size = None

    def __init__(
        self,
        stream: SequenceStream,
        chosen: CurriculumConfig,
        seed: int,
        path: Path,
        about: Mapping[str, Any],
        fsync: bool = False,
    ) -> None:
        self._stream, self._chosen, self._seed, self._path = stream, chosen, seed, path
        self._about, self._fsync = {**about, "seed": seed, "rows": stream.size}, fsync
        self._file: BinaryIO | None = None
        self._seen: dict[int, deque[float]] = {}
        self._epochs: list[Epoch] = []
        self._rest: set[int] = set()
        self._add(set())

    @property
    def end(self) -> int:
        """The first ordinal whose epoch is not drawn."""
        last = self._epochs[-1]
        return last.first + len(last.rows)

    def place_of(self, ordinal: int) -> str:
        return self._stream.place_of_row(self._row(ordinal))

    def task_at(self, ordinal: int) -> Task:
        """TaskError for one whose epoch is not drawn."""
        return self._stream.task_of_row(ordinal, self._row(ordinal))

    def read(self) -> None:
        """Take in what the file has, if there is one.

        TaskError for one that is damaged before its last line, or is of another source.
        """
        if not self._path.exists():
            return
        *lines, _half = self._path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            if wrong := self._take_in(line):
                rule = f"{wrong}; take the file away to begin its epochs anew"
                raise TaskError(f"{self._path}, line {number}: {rule}")

    # ------------------------------------------------------------------ the feeder

    def begin(self, anew: bool) -> None:
        """Write from now on: to an empty file (`anew`), or behind what it has, without a last line that is not whole.

        Raises as `read`, and OSError.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if anew:
            self._path.unlink(missing_ok=True)
        self.read()
        self._file = self._path.open("ab")
        self._file.truncate(self._path.read_bytes().rfind(b"\n") + 1)
        if self._file.tell() == 0:
            self._write({"about": self._about})

    def take(self, scores: Sequence[OrdinalScore]) -> None:
        """Note scores of tasks of this stream. OSError if they cannot be written."""
        if scores:
            self._write({"scores": scores})
            self._note(scores)

    def draw(self) -> dict[str, Any]:
        """Add an epoch, by the scores so far. Returns its figures. OSError as for `take`."""
        solved = self._solved()
        rest = self._resting(solved)
        found = {
            "epoch": len(self._epochs),
            "first": self.end,
            "tasks": self._stream.size - len(rest),
            "again": len(solved) - len(rest),
            "rest": len(rest),
            **self._means(rest),
        }
        self._write({**found, "begin": sorted(rest - self._rest), "end": sorted(self._rest - rest)})
        self._add(rest)
        return found

    # ------------------------------------------------------------------ inside

    def _row(self, ordinal: int) -> int:
        """The row of the source that an ordinal has."""
        if ordinal >= self.end:
            raise TaskError(
                f"task {ordinal}: its epoch is not drawn yet; {self._path} has those before {self.end}"
            )
        epoch = self._epochs[bisect_right(self._epochs, ordinal, key=lambda each: each.first) - 1]
        return int(epoch.rows[ordinal - epoch.first])

    def _solved(self) -> list[int]:
        visits, solved = self._chosen.visits, self._chosen.solved
        assert solved is not None
        judged = ((row, scores) for row, scores in sorted(self._seen.items()) if len(scores) == visits)
        return [row for row, scores in judged if fmean(scores) >= solved]

    def _resting(self, solved: Sequence[int]) -> set[int]:
        """Those of the solved rows that do not come again, which are those with the least draws."""
        draws = uniform(self._seed, REVISITS, len(self._epochs), np.array(solved, np.int64))
        lacking = min(LEAST_TASKS, self._stream.size) - (self._stream.size - len(solved))
        again = max(int((draws < self._chosen.revisit).sum()), lacking)
        return {solved[at] for at in np.argsort(draws, kind="stable")[again:]}

    def _means(self, rest: set[int]) -> dict[str, float | None]:
        """Means of the last scores: of all rows that have some, and of those that do not rest."""
        means = {row: fmean(scores) for row, scores in self._seen.items()}
        drawn = [mean for row, mean in means.items() if row not in rest]
        return {
            "mean_of_all": fmean(means.values()) if means else None,
            "mean_of_drawn": fmean(drawn) if drawn else None,
        }

    def _add(self, rest: set[int]) -> None:
        first = self.end if self._epochs else 0
        order = np.fromiter(self._stream.order_of(len(self._epochs)), np.int64, self._stream.size)
        rests = np.zeros(self._stream.size, bool)
        rests[[*rest]] = True
        self._epochs.append(Epoch(first, order[~rests[order]]))
        self._rest = rest

    def _note(self, scores: Iterable[OrdinalScore]) -> None:
        for ordinal, score in scores:
            if ordinal < self.end:
                self._seen.setdefault(self._row(ordinal), deque(maxlen=self._chosen.visits)).append(score)

    def _write(self, row: dict[str, Any]) -> None:
        assert self._file is not None, "begin comes first"
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        if self._fsync:
            os.fsync(self._file.fileno())

    def _take_in(self, line: bytes) -> str:
        """Returns the fault of a line of the file; empty for none."""
        try:
            row = json.loads(line)
            if "about" in row:
                same = row["about"] == self._about
                return "" if same else f"it is of {row['about']}, and not of {self._about}"
            if "scores" in row:
                self._note(row["scores"])
                return ""
            begin, end = {*row["begin"]}, {*row["end"]}
            in_order = row["epoch"] == len(self._epochs) and row["first"] == self.end
            known = all(0 <= each < self._stream.size for each in begin) and end <= self._rest
            if not in_order or not known:
                return "it does not follow the one before"
            self._add((self._rest | begin) - end)
        except (ValueError, KeyError, TypeError) as damage:
            return f"it is damaged: {damage!r}"
        return ""
