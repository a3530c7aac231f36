"""The state of one process: its latest figures, and the waits that it is in.

The loops of the process write it; a view on another thread reads it (`launch/views/process_view.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LATE, UNDER_WAY = "late/", "under_way/"
"""Figures of reward functions, before the name of each: calls that took too long, and calls now."""


def without_timely_calls(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Calls under way are a sign of trouble only for a function that was late.

    >>> without_timely_calls({"under_way/f": 3, "under_way/g": 2, "late/g": 1, "tokens": 9})
    {'under_way/g': 2, 'late/g': 1, 'tokens': 9}
    """
    return {
        name: value
        for name, value in figures.items()
        if not name.startswith(UNDER_WAY) or name.replace(UNDER_WAY, LATE, 1) in figures
    }


@dataclass(frozen=True, slots=True)
class Wait:
    """since, until: by the clock of the status; until: the time at which the wait fails, None if it has no deadline."""

    whom: str
    since: float
    until: float | None = None

    def text(self, now: float) -> str:
        """
        >>> Wait("the queue at tcp://10.0.0.1:5555", 100.0, 160.0).text(now=112.4)
        'waiting for the queue at tcp://10.0.0.1:5555 (12 s, gives up at 60 s)'
        >>> Wait("the learner's weights", 100.0).text(now=103.0)
        "waiting for the learner's weights (3 s)"
        """
        end = "" if self.until is None else f", gives up at {self.until - self.since:.0f} s"
        return f"waiting for {self.whom} ({now - self.since:.0f} s{end})"


class ProcessStatus:
    """Any thread may write and read it.

    figures  the process's counts; replaced as a whole
    failure  the reason why the last task was dropped, if that was a failure, else empty
    warning  a problem for the run's terminal that does not stop the process, else empty
    loaded   set when models and engines are loaded. Then a view may use the terminal: loading may fork, and a fork must
             not happen while another thread writes a line.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.figures: Mapping[str, Any] = {}
        self.failure = self.warning = ""
        self.loaded = threading.Event()
        self.clock = clock
        self._waits: dict[str, Wait] = {}
        self._lock = threading.Lock()

    def wait_begins(self, whom: str, seconds: float | None = None) -> None:
        """Begin a wait, or set a new deadline for one that has begun. seconds: until the process gives up."""
        now = self.clock()
        until = None if seconds is None else now + seconds
        with self._lock:
            before = self._waits.get(whom)
            self._waits[whom] = Wait(whom, now if before is None else before.since, until)

    def wait_ends(self, whom: str) -> None:
        """End a wait, if it has begun."""
        with self._lock:
            self._waits.pop(whom, None)

    @contextmanager
    def waiting(self, whom: str, seconds: float | None = None) -> Iterator[None]:
        """`wait_begins` and `wait_ends` around a block."""
        self.wait_begins(whom, seconds)
        try:
            yield
        finally:
            self.wait_ends(whom)

    def waits(self, least_s: float) -> list[Wait]:
        """The waits of at least this length, the longest first."""
        now = self.clock()
        with self._lock:
            found = [wait for wait in self._waits.values() if now - wait.since >= least_s]
        return sorted(found, key=lambda wait: wait.since)
