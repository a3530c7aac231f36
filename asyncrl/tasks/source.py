"""Where tasks come from: a function, or a .jsonl file, as a stream that gives the task of any ordinal.

    'package.module:function', 'file.py:function'   called with tasks.options; returns rows
    'problems.jsonl'                                one row a line

A row is a `Task`, or a mapping that holds the prompt under `prompt_key`; its other fields become `task.data`.
Rows with a length (a list, a Hugging Face data set) repeat for ever, one epoch after another, in a new order
each if shuffled. Rows without (a generator) come in their own order and end when they end.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from asyncrl.config.dotted import load_function
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, SourceEndedError, TaskError
from asyncrl.types import Task

Row = Task | Mapping[str, Any]
ToTask = Callable[[int, int, Row], Task]
"""(ordinal, index of the row in its source, row) → Task; raises TaskError."""


class SequenceStream:
    """Rows with a length. `task_at` is pure: epoch = ordinal // size, its order fixed by (seed, epoch)."""

    def __init__(self, rows: Sequence[Row], to_task: ToTask, seed: int, shuffle: bool) -> None:
        self.size = len(rows)
        self._rows, self._to_task, self._seed, self._shuffle = rows, to_task, seed, shuffle
        self._epoch, self._order = -1, np.arange(self.size)

    def task_at(self, ordinal: int) -> Task:
        epoch, place = divmod(ordinal, self.size)
        if self._shuffle and epoch != self._epoch:
            self._order = np.random.default_rng([abs(self._seed), epoch]).permutation(self.size)
            self._epoch = epoch
        index = int(self._order[place])
        try:
            row = self._rows[index]
        except Exception as error:
            raise TaskError(f"row {index} of the task source cannot be read: {error!r}") from error
        return self._to_task(ordinal, index, row)


class IteratorStream:
    """Rows without a length, read one by one and not kept.

    An ordinal below the next one starts the source again and skips up to it, so `task_at` is pure if the
    source gives the same rows each time. Past the end it raises SourceEndedError.
    """

    size = None

    def __init__(self, open_rows: Callable[[], Iterator[Row]], to_task: ToTask) -> None:
        self._open_rows, self._to_task = open_rows, to_task
        self._rows, self._next = open_rows(), 0

    def task_at(self, ordinal: int) -> Task:
        if ordinal < self._next:
            self._rows, self._next = self._open_rows(), 0
        while True:
            try:
                row = next(self._rows)
            except StopIteration:
                raise SourceEndedError(f"the task source ended after {self._next} tasks") from None
            except Exception as error:
                raise TaskError(f"the task source failed after {self._next} tasks: {error!r}") from error
            self._next += 1
            if self._next == ordinal + 1:
                return self._to_task(ordinal, ordinal, row)


TaskStream = SequenceStream | IteratorStream


@dataclass(frozen=True, slots=True)
class _RowReader:
    """Turns rows into tasks; `places` says where each row was written, for the error."""

    source: str
    prompt_key: str
    places: Sequence[str] = ()

    def __call__(self, ordinal: int, index: int, row: Row) -> Task:
        place = self.places[index] if self.places else f"{self.source}: task {index}"
        if isinstance(row, Task):
            task = replace(row, ordinal=ordinal)
        elif not isinstance(row, Mapping):
            raise TaskError(
                f"{place} is a {type(row).__name__}, not a mapping with the key {self.prompt_key!r}"
            )
        elif self.prompt_key not in row:
            raise TaskError(
                f"{place} has no {self.prompt_key!r}, only {', '.join(map(repr, row)) or 'nothing'}"
            )
        else:
            data = {name: value for name, value in row.items() if name != self.prompt_key}
            task = Task(ordinal, row[self.prompt_key], data)
        if not _is_prompt(task.prompt):
            raise TaskError(f"{place}: the prompt must be a text or a list of messages with role and content")
        try:
            msgpack.packb(dict(task.data))
        except (TypeError, ValueError, OverflowError) as error:
            raise TaskError(f"{place}: its data cannot travel to another process: {error}") from None
        return task


def load_source(
    source: str,
    options: Mapping[str, Any] | None = None,
    prompt_key: str = "prompt",
    *,
    seed: int = 0,
    shuffle: bool = False,
    section: str = "tasks",
) -> TaskStream:
    """Open a source and read its first row.

    Raises ConfigError (keys of `section`) for a source that does not exist or options that it does not take,
    TaskError for a bad row: in a file at once, with file and line; of a function when it comes.
    """
    if source.endswith(".jsonl"):
        rows, places = _read_jsonl(Path(source), section)
        reader = _RowReader(source, prompt_key, places)
        for index, row in enumerate(rows):
            reader(index, index, row)
        return SequenceStream(rows, reader, seed, shuffle)
    made = _call_source(source, dict(options or {}), section)
    reader = _RowReader(source, prompt_key)
    if isinstance(made, Sequence) or (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
        if not len(made):
            raise TaskError(f"{source} gives no tasks")
        stream: TaskStream = SequenceStream(made, reader, seed, shuffle)
    elif isinstance(made, Iterable):
        if shuffle:
            raise ConfigError(
                f"{section}.shuffle",
                True,
                f"{source} gives an iterator, which has no order to change",
                f"set {section}.shuffle=false or return a list",
            )
        stream = IteratorStream(partial(_open, source, options, section), reader)
    else:
        raise TaskError(f"{source} returned a {type(made).__name__}, not a sequence or an iterator of tasks")
    stream.task_at(0)
    return stream


def train_stream(config: Config) -> TaskStream:
    """The stream of `tasks`."""
    tasks = config.tasks
    return load_source(
        tasks.source, tasks.options, tasks.prompt_key, seed=config.run.seed, shuffle=tasks.shuffle
    )


def held_out(config: Config) -> Sequence[Task]:
    """All tasks of `evaluation`, in their order; none without evaluation.source."""
    chosen = config.evaluation
    if chosen.source is None:
        return []
    stream = load_source(chosen.source, chosen.options, chosen.prompt_key, section="evaluation")
    if stream.size is not None:
        return [stream.task_at(ordinal) for ordinal in range(stream.size)]
    tasks: list[Task] = []
    try:
        while True:
            tasks.append(stream.task_at(len(tasks)))
    except SourceEndedError:
        return tasks


def _open(source: str, options: Mapping[str, Any] | None, section: str) -> Iterator[Row]:
    return iter(_call_source(source, dict(options or {}), section))


def _call_source(source: str, options: dict[str, Any], section: str) -> Any:
    function = load_function(source, f"{section}.source")
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        takes = ", ".join(inspect.signature(function).parameters) or "nothing"
        raise ConfigError(f"{section}.options", options, str(error), f"{source} takes {takes}") from None
    try:
        return function(**options)
    except Exception as error:
        raise TaskError(f"{source} raised {type(error).__name__}: {error}") from error


def _read_jsonl(path: Path, section: str) -> tuple[list[Row], list[str]]:
    """The rows, and 'file:line' of each."""
    rows: list[Row] = []
    places: list[str] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{section}.source", str(path), reason, "give the path of a .jsonl file") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise TaskError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from None
            places.append(f"{path}:{number}")
    if not rows:
        raise TaskError(f"{path}: holds no tasks")
    return rows, places


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in prompt)
    )
