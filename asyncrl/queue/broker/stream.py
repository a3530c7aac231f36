"""One stream at the broker: its ledger, and the bytes that the ledger's entries stand for.

Tasks are kept here. Their results are in the store, in parts: the finished part of a task, the group, and a column part
for each stage. The ledger alone decides how long: after every event its state names the ordinals whose bytes are of no
more use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from asyncrl.errors import RefusedError
from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.events import Event
from asyncrl.queue.ledger.ledger import Ledger
from asyncrl.queue.ledger.state.tasks import TaskRecord
from asyncrl.queue.ledger.transitions import apply
from asyncrl.queue.protocol import requests as rq
from asyncrl.queue.storage.records import Happened, Record, TasksKept
from asyncrl.queue.storage.store import Frames, PayloadStore
from asyncrl.queue.wire.envelope import REPLY_BYTES, ReplyRoom
from asyncrl.types import Version

PROGRESS, GROUP = "progress", "group"
COLUMN = "column/"

MOST_SCORES = 1 << 16
"""Scores that wait for the feeder; beyond it, the oldest are forgotten."""

NOT_COMPARED = 0
"""The stamp of progress: the latest part is used, whichever it is."""


class Content(NamedTuple):
    """The group of an ordinal as it goes out: its frames, then those of each column part.

    columns: (stage, version of the policy that they depend on, how many frames) in the order of the frames.
    worker: that committed the group; empty where that was at an earlier broker
    """

    ordinal: int
    group: Frames
    columns: Sequence[tuple[str, Version, int]]
    added: Sequence[Any]
    worker: str = ""

    @property
    def frames(self) -> list[Any]:
        return [*self.group, *self.added]


class Stream:
    """note: receives every record that the next broker needs. tasks: packed, by ordinal."""

    def __init__(self, name: str, store: PayloadStore, note: Callable[[Record], None]) -> None:
        self.ledger = Ledger(self._follow)
        self.changes = 0  # events so far
        self.tasks: dict[int, bytes] = {}
        self._committed_by: dict[int, str] = {}
        self._scores: deque[tuple[int, float]] = deque()
        self._first_score = 0  # number of the oldest
        self._name, self._store, self._note = name, store, note

    # ------------------------------------------------------------------ in

    def submit(self, request: rq.SubmitRequest) -> None:
        tasks = request.tasks
        if not tasks:
            return
        largest = max(len(packed) for _, packed in tasks)
        if largest > REPLY_BYTES:
            raise RefusedError("large", f"a task of {largest} bytes; a reply has room for {REPLY_BYTES}")
        self.ledger.submit(tasks[0][0], len(tasks), request.min_version)
        records = self.ledger.state.tasks.records
        new = {
            ordinal: packed for ordinal, packed in tasks if ordinal in records and ordinal not in self.tasks
        }
        if new:
            self.tasks.update(new)
            self._note(TasksKept(self._name, tuple(new.items())))

    def put_group(self, ordinal: int, frames: Frames, stamp: int, worker: str) -> None:
        """Keep a group that the ledger has taken from this worker."""
        self._committed_by[ordinal] = worker
        self.put(ordinal, GROUP, frames, stamp)

    def put(self, ordinal: int, part: str, frames: Frames, stamp: int) -> None:
        """Keep a result that the ledger has taken."""
        self._store.put(self._name, ordinal, part, frames, stamp)

    def note_score(self, ordinal: int, score: float | None) -> None:
        """Keep the score of a finished group for the feeder. It goes with this broker."""
        if score is not None:
            self._scores.append((ordinal, score))
            self._forget_scores(len(self._scores) - MOST_SCORES)

    # ------------------------------------------------------------------ out

    def scores_since(self, number: int) -> tuple[int, list[tuple[int, float]]]:
        """The number of the next score, and (ordinal, score) of each from `number` on. Those before are forgotten."""
        self._forget_scores(number - self._first_score)
        return self._first_score + len(self._scores), [*self._scores]

    def _forget_scores(self, count: int) -> None:
        for _ in range(min(count, len(self._scores))):
            self._scores.popleft()
            self._first_score += 1

    def progress_of(self, ordinal: int) -> Frames:
        """The part of a task that earlier leases finished."""
        return self._store.get(self._name, ordinal, PROGRESS)

    def contents(self, ordinals: Iterable[int]) -> list[Content]:
        """The bytes of groups that are ready or claimed: of as many of the first ones as one reply has room for."""
        room, contents = ReplyRoom(), []
        for ordinal in ordinals:
            content = self.content(ordinal)
            if not room.take(len(content.frames), self.ledger.state.tasks.records[ordinal].nbytes):
                break
            contents.append(content)
        return contents

    def content(self, ordinal: int) -> Content:
        columns: list[tuple[str, Version, int]] = []
        added: list[Any] = []
        for stage, column in self.ledger.state.tasks.records[ordinal].added.items():
            frames = self._store.get(self._name, ordinal, COLUMN + stage)
            columns.append((stage, column.version, len(frames)))
            added += frames
        worker = self._committed_by.get(ordinal, "")
        return Content(ordinal, self._store.get(self._name, ordinal, GROUP), columns, added, worker)

    # ------------------------------------------------------------------ keeping

    def replay(self, event: Event) -> None:
        """An event of the journal. The store has seen it already."""
        apply(self.ledger.state, event)
        self._forget_tasks()

    def needed(self) -> Iterator[tuple[int, str, int]]:
        """(ordinal, part, stamp) of all that the ledger counts on."""
        state = self.ledger.state
        for ordinal, task in state.tasks.records.items():
            if task.progress:
                yield ordinal, PROGRESS, NOT_COMPARED
            elif task.nbytes:
                yield from _made(ordinal, task)
        for step in state.steps.retained.steps.values():
            for ordinal, task in step.records.items():
                yield from _made(ordinal, task)

    def _follow(self, event: Event) -> None:
        self.changes += 1
        self._note(Happened(self._name, event))
        state = self.ledger.state
        if isinstance(event, ev.Committed):
            self._store.drop(self._name, event.ordinal, PROGRESS)
        elif isinstance(event, ev.StepTrained) and event.step in state.steps.retained.steps:
            for ordinal in state.steps.retained.steps[event.step].records:
                self._store.cool(self._name, ordinal)
        usage = state.usage
        for ordinal in (*usage.unmade, *usage.gone):
            self._store.drop(self._name, ordinal)
        self._forget_tasks()

    def _forget_tasks(self) -> None:
        for ordinal in self.ledger.state.usage.gone:
            self.tasks.pop(ordinal, None)
            self._committed_by.pop(ordinal, None)


def _made(ordinal: int, task: TaskRecord) -> Iterator[tuple[int, str, int]]:
    yield ordinal, GROUP, task.digest
    for stage, column in task.added.items():
        yield ordinal, COLUMN + stage, column.digest


def groups_reply(contents: Sequence[Content], value: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The value and the frames of a reply with groups."""
    counts = {
        "ordinals": [content.ordinal for content in contents],
        "groups": [len(content.group) for content in contents],
        "columns": [content.columns for content in contents],
        "workers": [content.worker for content in contents],
    }
    return {**counts, **value}, flat_frames(contents)


def flat_frames(contents: Sequence[Content]) -> list[Any]:
    return [frame for content in contents for frame in content.frames]
