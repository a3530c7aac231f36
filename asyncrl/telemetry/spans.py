"""Accounts for the time of one process: each second belongs to exactly one name.

A loop wraps its work in `spans("compute")`, `spans("wait/groups")`, …. Inner spans pause the outer one, so the seconds
of all names add up to the wall time. Names that begin with `wait/` are waits, all others are work, and time outside of
any span is "other".
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from asyncrl.telemetry.tracing import OTHER, LoopLane

WAIT = "wait/"


class Spans:
    """Not thread-safe: one instance per loop. lane: of the process's trace, which gets the same spans; None: of none.

    >>> ticks = iter([0.0, 1.0, 4.0, 4.0, 5.0])
    >>> spans = Spans(clock=lambda: next(ticks))
    >>> with spans("compute"):
    ...     pass
    >>> spans.share("compute")
    0.75
    >>> spans.take()
    {'other': 2.0, 'compute': 3.0}
    """

    def __init__(self, lane: str | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lane = None if lane is None else LoopLane(lane)
        self._seconds: dict[str, float] = defaultdict(float)
        self._current = OTHER
        self._since = clock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def take(self) -> dict[str, float]:
        """Seconds per name since the last take (or the start), the running span included up to now."""
        self._switch(self._current)
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken

    def share(self, name: str) -> float:
        """The share of `name` in the time since the last take; 0 before any time has passed."""
        self._switch(self._current)
        total = sum(self._seconds.values())
        return self._seconds.get(name, 0.0) / total if total > 0 else 0.0

    def _switch(self, name: str) -> str:
        now = self._clock()
        self._seconds[self._current] += now - self._since
        self._since = now
        outer, self._current = self._current, name
        if self._lane is not None and name != outer:
            self._lane.do(name)
        return outer


def busy_share(seconds: Mapping[str, float]) -> float:
    """Share of the time that was work: neither a wait nor unaccounted for.

    >>> busy_share({"compute": 3.0, "wait/groups": 4.0, "other": 1.0})
    0.375
    """
    total = sum(seconds.values())
    idle = sum(s for name, s in seconds.items() if name.startswith(WAIT) or name == OTHER)
    return (total - idle) / total if total > 0 else 0.0
