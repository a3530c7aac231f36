"""Streams of tasks. `task_at` is a pure function of the ordinal, so that a restarted process gets the same tasks.

Order(size, key).at(epoch, place)       a new order of range(size) in each epoch
part_of(ordinal, shares)                the source of a task in a mixture, and the task's number there
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from hashlib import blake2b
from math import isqrt
from typing import Protocol

import numpy as np

from asyncrl.errors import SourceEndedError, TaskError
from asyncrl.tasks.datasets.rows import Row
from asyncrl.types import Task

ToTask = Callable[[int, int, Row], Task]
"""(ordinal, index of the row in its source, row) → Task; raises TaskError."""

Place = Callable[[int], str]
"""Index of a row in its source → where it stands, for errors."""

MIXTURE = "mixture"
"""The field of `task.data` with the name of the task's source in `tasks.mixture`."""


class TaskStream(Protocol):
    """size: tasks of one epoch; None: there are no epochs."""

    @property
    def size(self) -> int | None: ...

    def task_at(self, ordinal: int) -> Task:
        """Raises SourceEndedError past the end of the source, and TaskError for a bad row."""
        ...

    def place_of(self, ordinal: int) -> str:
        """Where the row of a task stands, for errors: 'file:line' where it can be known."""
        ...


class SequenceStream:
    """Rows with a length: the epoch is ordinal // size. key: determines each epoch's order; None: the rows' own
    order."""

    def __init__(
        self,
        rows: Sequence[Row],
        to_task: ToTask,
        key: tuple[int, ...] | None,
        place: Place = "row {}".format,
    ) -> None:
        self.size = len(rows)
        self._rows, self._to_task, self._place = rows, to_task, place
        self._order = None if key is None else Order(self.size, key)

    def place_of(self, ordinal: int) -> str:
        return self.place_of_row(self._row_at(*divmod(ordinal, self.size)))

    def task_at(self, ordinal: int) -> Task:
        return self.task_of_row(ordinal, self._row_at(*divmod(ordinal, self.size)))

    def order_of(self, epoch: int) -> Iterator[int]:
        """The rows of an epoch, in its order."""
        return (self._row_at(epoch, place) for place in range(self.size))

    def place_of_row(self, index: int) -> str:
        return self._place(index)

    def task_of_row(self, ordinal: int, index: int) -> Task:
        """The row as the task of an ordinal. TaskError for a bad one."""
        try:
            row = self._rows[index]
        except TaskError:
            raise
        except Exception as error:
            raise TaskError(f"row {index} of the task source cannot be read: {error!r}") from error
        return self._to_task(ordinal, index, row)

    def _row_at(self, epoch: int, place: int) -> int:
        return place if self._order is None else self._order.at(epoch, place)


class IteratorStream:
    """Rows without a length, read one by one.

    An ordinal below the next one opens the source again and skips rows, so `task_at` is pure if the source repeats its
    rows.
    """

    size = None

    def __init__(
        self, open_rows: Callable[[], Iterator[Row]], to_task: ToTask, place: Place = "row {}".format
    ) -> None:
        self._open_rows, self._to_task, self.place_of = open_rows, to_task, place
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
    """Several streams in proportion to their weights. Each has its own epochs; the first that ends, ends the
    mixture."""

    size = None

    def __init__(self, parts: Mapping[str, tuple[TaskStream, float]]) -> None:
        self._names, self._streams = list(parts), [stream for stream, _ in parts.values()]
        weights = [Fraction(weight) for _, weight in parts.values()]
        self._shares = [weight / sum(weights) for weight in weights]

    def place_of(self, ordinal: int) -> str:
        part, at = part_of(ordinal, self._shares)
        return self._streams[part].place_of(at)

    def task_at(self, ordinal: int) -> Task:
        part, at = part_of(ordinal, self._shares)
        task = self._streams[part].task_at(at)
        return replace(task, ordinal=ordinal, data={**task.data, MIXTURE: self._names[part]})


LISTED = 1 << 20
"""Up to this number of rows an epoch's order is an array, of at most 8 MB; above, each place is computed on access."""

ROUNDS = 8


class Order:
    """The order of each epoch, a function of (key, epoch)."""

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        self._size, self._key = size, key
        self._epoch, self._listed = -1, np.empty(0, np.int64)

    def at(self, epoch: int, place: int) -> int:
        if self._size > LISTED:
            return shuffled(place, self._size, (*self._key, epoch))
        if epoch != self._epoch:
            self._listed = np.random.default_rng([*self._key, epoch]).permutation(self._size)
            self._epoch = epoch
        return int(self._listed[place])


def shuffled(place: int, size: int, key: tuple[int, ...]) -> int:
    """A bijection of range(size) for each `key`, in constant memory.

    It is a Feistel network over pairs (l, r), 0 ≤ l < a, 0 ≤ r < b with a·b ≥ size, repeated until the number is
    inside: Black and Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002), §3 and §4.
    """
    a = isqrt(size - 1) + 1
    b = -(-size // a)
    while True:
        left, right = divmod(place, b)
        for turn in range(0, ROUNDS, 2):
            left = (left + _hash(key, turn, right)) % a
            right = (right + _hash(key, turn + 1, left)) % b
        place = left * b + right
        if place < size:
            return place


def part_of(ordinal: int, shares: Sequence[Fraction]) -> tuple[int, int]:
    """(part, number of that part's earlier tasks). shares: each part's share of all tasks; their sum is 1.

    The first part takes ordinal t if ⌊(t+1)·share⌋ > ⌊t·share⌋. The second does the same with the remaining ordinals,
    and so on. After t tasks, the count of the n-th part differs from its exact share by at most n.

    >>> [part_of(t, [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)]) for t in range(6)]
    [(2, 0), (0, 0), (1, 0), (0, 1), (2, 1), (0, 2)]
    """
    left = Fraction(1)
    for part, share in enumerate(shares[:-1]):
        of_left = share / left
        before = ordinal * of_left // 1
        if (ordinal + 1) * of_left // 1 > before:
            return part, before
        ordinal, left = ordinal - before, left - share
    return len(shares) - 1, ordinal


def _hash(key: tuple[int, ...], turn: int, half: int) -> int:
    text = "/".join(map(str, (*key, turn, half)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
