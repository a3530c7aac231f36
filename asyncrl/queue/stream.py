"""One stream at the broker: its ledger, and the bytes that the ledger's entries stand for.

Tasks are kept until they are committed, payloads until they are trained or handed over for good. The bytes
follow the ledger's events, so that nothing is kept that the ledger has forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.queue import events as ev
from asyncrl.queue.events import Event
from asyncrl.queue.ledger import Ledger
from asyncrl.types import Version

Frames = Sequence[Any]
"""Raw frames of one group (`zmq.Frame`s at a real broker), never looked into."""


class Stream:
    def __init__(self) -> None:
        self.ledger = Ledger(self._follow)
        self.changes = 0  # events so far
        self._tasks: dict[int, bytes] = {}
        self._payloads: dict[int, Frames] = {}
        self._claimed: list[int] = []

    def submit(self, tasks: Sequence[tuple[int, bytes]], min_version: Version) -> None:
        """Tasks with consecutive ordinals, packed."""
        if not tasks:
            return
        self.ledger.submit(tasks[0][0], len(tasks), min_version)
        for ordinal, packed in tasks:
            if ordinal in self.ledger.book.items:
                self._tasks.setdefault(ordinal, packed)

    def task(self, ordinal: int) -> bytes:
        return self._tasks[ordinal]

    def commit(
        self, ordinal: int, epoch: int, tokens: int, start_version: Version, digest: int, frames: Frames
    ) -> None:
        nbytes = sum(len(frame) for frame in frames)
        if self.ledger.commit(ordinal, epoch, tokens, nbytes, start_version, digest):
            self._payloads[ordinal] = frames

    def payloads(self, ordinals: Sequence[int]) -> list[Frames]:
        return [self._payloads[ordinal] for ordinal in ordinals]

    def collect(self, learner_epoch: int) -> list[Frames]:
        return [self._payloads.pop(ordinal) for ordinal in self.ledger.collect(learner_epoch)]

    def _follow(self, event: Event) -> None:
        self.changes += 1
        match event:
            case ev.Committed(ordinal=ordinal) | ev.Dropped(ordinal=ordinal):
                # A task that the feeder submits again after a rewind brings its bytes along.
                self._tasks.pop(ordinal, None)
            case ev.StepClaimed(shares=shares):
                self._claimed += [ordinal for share in shares for ordinal in share]
            case ev.StepTrained() | ev.StepRejected():
                for ordinal in self._claimed:
                    del self._payloads[ordinal]
                self._claimed = []
            case ev.Rewound() | ev.Finished():
                self._tasks, self._payloads, self._claimed = {}, {}, []
