"""A stream gives the task of any ordinal: `task_at` is pure, so that whoever comes back asks again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Protocol

from asyncrl.errors import SourceEndedError, TaskError
from asyncrl.tasks.order import Order, part_of
from asyncrl.tasks.reader import Row
from asyncrl.types import Task

ToTask = Callable[[int, int, Row], Task]
"""(ordinal, index of the row in its source, row) → Task; raises TaskError."""

MIXTURE = "mixture"
"""Where `task.data` says from which of `tasks.mixture` the task is."""


class TaskStream(Protocol):
    """size: tasks of one epoch; none: there is no epoch."""

    @property
    def size(self) -> int | None: ...

    def task_at(self, ordinal: int) -> Task:
        """Raises SourceEndedError past the end of a source that has one, TaskError for a bad row."""
        ...


class SequenceStream:
    """Rows with a length, one epoch after another: epoch = ordinal // size. key: what fixes each epoch's order; none:
    the rows' own."""

    def __init__(self, rows: Sequence[Row], to_task: ToTask, key: tuple[int, ...] | None) -> None:
        self.size = len(rows)
        self._rows, self._to_task = rows, to_task
        self._order = None if key is None else Order(self.size, key)

    def task_at(self, ordinal: int) -> Task:
        epoch, index = divmod(ordinal, self.size)
        if self._order is not None:
            index = self._order.at(epoch, index)
        try:
            row = self._rows[index]
        except TaskError:
            raise
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


class MixtureStream:
    """Several streams by weight, evenly spread; each has its own epochs. It ends with the first of them that ends."""

    size = None

    def __init__(self, parts: Mapping[str, tuple[TaskStream, float]]) -> None:
        self._names, self._streams = list(parts), [stream for stream, _ in parts.values()]
        weights = [Fraction(weight) for _, weight in parts.values()]
        self._shares = [weight / sum(weights) for weight in weights]

    def task_at(self, ordinal: int) -> Task:
        part, at = part_of(ordinal, self._shares)
        task = self._streams[part].task_at(at)
        return replace(task, ordinal=ordinal, data={**task.data, MIXTURE: self._names[part]})
