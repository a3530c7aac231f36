"""One stream at the broker: its ledger, and the bytes that the ledger's entries stand for.

Tasks are kept here. What is made of them is in the store, in parts: what is finished of a task, the group, and a
column part for each stage. The ledger alone decides how long: after every event its book names the ordinals whose
bytes are of no more use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from asyncrl.queue.broker.records import Happened, Record, TasksKept
from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.events import Event
from asyncrl.queue.ledger.ledger import Ledger
from asyncrl.queue.ledger.task_record import TaskRecord
from asyncrl.queue.ledger.transitions import apply
from asyncrl.queue.storage.store import Frames, PayloadStore
from asyncrl.types import Version

PROGRESS, GROUP = "progress", "group"
COLUMN = "column/"

NOT_COMPARED = 0
"""The stamp of progress: whichever was kept last will do."""


class Content(NamedTuple):
    """The group of an ordinal as it goes out: its frames, then those of each column part.

    columns: (stage, version of the policy that they depend on, how many frames) in the order of the frames.
    """

    ordinal: int
    group: Frames
    columns: Sequence[tuple[str, Version, int]]
    added: Sequence[Any]

    @property
    def frames(self) -> list[Any]:
        return [*self.group, *self.added]


def ignore(record: Record) -> None:
    """Of a queue without a journal."""


class Stream:
    """note: told of everything that a broker which comes next must know. tasks: packed, by ordinal."""

    def __init__(
        self, name: str, store: PayloadStore | None = None, note: Callable[[Record], None] = ignore
    ) -> None:
        self.ledger = Ledger(self._follow)
        self.changes = 0  # events so far
        self.tasks: dict[int, bytes] = {}
        self._name, self._store, self._note = name, store or PayloadStore(), note

    # ------------------------------------------------------------------ in

    def submit(self, tasks: Sequence[tuple[int, bytes]], min_version: Version) -> None:
        """Tasks with consecutive ordinals, packed."""
        if not tasks:
            return
        self.ledger.submit(tasks[0][0], len(tasks), min_version)
        items = self.ledger.book.items
        new = {ordinal: packed for ordinal, packed in tasks if ordinal in items and ordinal not in self.tasks}
        if new:
            self.tasks.update(new)
            self._note(TasksKept(self._name, tuple(new.items())))

    def progress(self, ordinal: int, epoch: int, frames: Frames) -> None:
        self.ledger.progress(ordinal, epoch, _size(frames))
        self._store.put(self._name, ordinal, PROGRESS, frames, NOT_COMPARED)

    def commit(
        self,
        ordinal: int,
        epoch: int,
        tokens: int,
        start_version: Version,
        digest: int,
        columns: Collection[str],
        frames: Frames,
        squares: int = 0,
    ) -> None:
        size = _size(frames)
        if self.ledger.commit(ordinal, epoch, tokens, size, start_version, digest, columns, squares):
            self._store.put(self._name, ordinal, GROUP, frames, digest)

    def stage_commit(
        self, stage: str, ordinal: int, epoch: int, version: Version, digest: int, frames: Frames
    ) -> None:
        if self.ledger.stage_commit(stage, ordinal, epoch, _size(frames), version, digest):
            self._store.put(self._name, ordinal, COLUMN + stage, frames, digest)

    # ------------------------------------------------------------------ out

    def task(self, ordinal: int) -> bytes:
        return self.tasks[ordinal]

    def finished_of(self, ordinal: int) -> Frames:
        """What earlier leases finished of a task."""
        return self._store.get(self._name, ordinal, PROGRESS)

    def contents(self, ordinals: Sequence[int]) -> list[Content]:
        """Of groups that are ready or claimed."""
        return [self._content(ordinal) for ordinal in ordinals]

    def collect(self, learner_epoch: int, got: Collection[int], corrupt: Collection[int]) -> list[Content]:
        return self.contents(self.ledger.collect(learner_epoch, got, corrupt))

    def _content(self, ordinal: int) -> Content:
        columns: list[tuple[str, Version, int]] = []
        added: list[Any] = []
        for stage, column in self.ledger.book.items[ordinal].added.items():
            frames = self._store.get(self._name, ordinal, COLUMN + stage)
            columns.append((stage, column.version, len(frames)))
            added += frames
        return Content(ordinal, self._store.get(self._name, ordinal, GROUP), columns, added)

    # ------------------------------------------------------------------ keeping

    def replay(self, event: Event) -> None:
        """An event of the journal. The store has seen it already."""
        apply(self.ledger.book, event)
        for ordinal in self.ledger.book.gone:
            self.tasks.pop(ordinal, None)

    def needed(self) -> Iterator[tuple[int, str, int]]:
        """(ordinal, part, stamp) of all that the ledger counts on."""
        book = self.ledger.book
        for ordinal, item in book.items.items():
            if item.progress:
                yield ordinal, PROGRESS, NOT_COMPARED
            elif item.nbytes:
                yield from _made(ordinal, item)
        for step in book.retention.steps.values():
            for ordinal, item in step.items.items():
                yield from _made(ordinal, item)

    def _follow(self, event: Event) -> None:
        self.changes += 1
        self._note(Happened(self._name, event))
        book = self.ledger.book
        if isinstance(event, ev.Committed):
            self._store.drop(self._name, event.ordinal, PROGRESS)
        elif isinstance(event, ev.StepTrained) and event.step in book.retention.steps:
            for ordinal in book.retention.steps[event.step].items:
                self._store.cool(self._name, ordinal)
        for ordinals in (book.unmade, book.gone):
            for ordinal in ordinals:
                self._store.drop(self._name, ordinal)
        for ordinal in book.gone:
            self.tasks.pop(ordinal, None)


def _made(ordinal: int, item: TaskRecord) -> Iterator[tuple[int, str, int]]:
    yield ordinal, GROUP, item.digest
    for stage, column in item.added.items():
        yield ordinal, COLUMN + stage, column.digest


def _size(frames: Frames) -> int:
    return sum(map(len, frames))
