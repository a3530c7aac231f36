"""Trackers beside a run: each on a thread of its own, so that a service that hangs or fails costs the run nothing.

    write, write_rollouts ──▸ room for ROOM calls ──▸ thread: import, open, call after call ──▸ package ──▸ its service
    never wait                without room: lost       a call that fails: lost; the next one is made

The first loss is a warning; the end has another one, with their number. `close` has one deadline for all of them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.telemetry.trackers.tracker import COLUMNS, Tracker, numbers

log = logging.getLogger(__name__)

ROOM = 1000
"""Calls that wait for their tracker: rows of as many versions."""

ROOM_BYTES = 1 << 28
"""Of text in tables of rollouts that wait."""

Call = Callable[[Tracker], None]


class BackgroundTracker(threading.Thread):
    """open: imports the package and opens the run there · abandon: lets this process end where the tracker hangs, be it
    in `open`"""

    def __init__(
        self, name: str, open: Callable[[], Tracker], room: int, abandon: Callable[[], None] | None
    ) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self._called, self._open, self._room, self._abandon = name, open, room, abandon
        self._calls: queue.SimpleQueue[tuple[Call, int] | None] = queue.SimpleQueue()
        self._bytes_in = self._bytes_out = 0  # each of one thread
        self._tracker: Tracker | None = None
        self._submitted = self._done = 0
        self._warned, self._lock = False, threading.Lock()

    def submit(self, call: Call, nbytes: int = 0) -> None:
        self._submitted += 1
        waiting, waiting_bytes = self._calls.qsize(), self._bytes_in - self._bytes_out
        if waiting < self._room and (waiting_bytes == 0 or waiting_bytes + nbytes <= ROOM_BYTES):
            self._bytes_in += nbytes
            self._calls.put((call, nbytes))
        else:
            self._warn(f"takes its rows too slowly: {waiting} wait")

    def run(self) -> None:
        try:
            self._tracker = self._open()
        except BaseException as error:  # a package may try to end the process, e.g. for want of a key
            self._warn(f"cannot be opened: {_short(error)}")
        while (taken := self._calls.get()) is not None:
            call, nbytes = taken
            self._done += self._succeeds(call)
            self._bytes_out += nbytes
        self._succeeds(lambda tracker: tracker.close())

    def end(self) -> None:
        """No further calls. The thread ends after those that it has."""
        self._calls.put(None)

    def join_until(self, deadline: float) -> None:
        """After `end`. deadline: by time.monotonic"""
        self.join(max(0.0, deadline - time.monotonic()))
        lost = self._submitted - self._done
        if self.is_alive():
            self._warn("does not end in time")
            if self._abandon is not None:
                self._abandon()
        if lost:
            log.warning("tracker %s lacks %d rows; metrics.jsonl has all", self._called, lost)

    def _succeeds(self, call: Call) -> bool:
        if self._tracker is None:
            return False
        try:
            call(self._tracker)
        except BaseException as error:
            self._warn(f"has failed: {_short(error)}")
            return False
        return True

    def _warn(self, why: str) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            log.warning("tracker %s %s; the run goes on, without those rows there", self._called, why)


class Trackers:
    """The trackers of one run. opened: by name, how to open each · abandon: likewise, for those that need it"""

    def __init__(
        self,
        opened: Mapping[str, Callable[[], Tracker]],
        room: int = ROOM,
        abandon: Mapping[str, Callable[[], None]] | None = None,
    ) -> None:
        ends = abandon or {}
        self._each = [BackgroundTracker(name, open, room, ends.get(name)) for name, open in opened.items()]
        for each in self._each:
            each.start()

    def write(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl."""
        version, values = row["version"], numbers(row)
        self._submit(lambda tracker: tracker.write(version, values))

    def write_rollouts(self, version: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of rollouts.jsonl."""
        table = [[row[name] for name in COLUMNS] for row in rows]
        nbytes = sum(len(cell) for line in table for cell in line if isinstance(cell, str))
        if table:
            self._submit(lambda tracker: tracker.write_rollouts(version, table), nbytes)

    def close(self, seconds: float) -> None:
        """seconds: for the last calls of all of them"""
        deadline = time.monotonic() + seconds
        for each in self._each:
            each.end()
        for each in self._each:
            each.join_until(deadline)

    def _submit(self, call: Call, nbytes: int = 0) -> None:
        for each in self._each:
            each.submit(call, nbytes)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
