"""When a process that has died is started again: at most so often within a window of time, and with growing pauses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class Restart:
    """One planned restart. at: the time · number: how many it makes within the window · over: whether it waits for the
    window to pass, since there were as many as there may be; `at` is infinite where there may be none."""

    at: float
    number: int
    over: bool


class Restarts:
    """Restarts of all processes of a run: pure, times are arguments.

    kind: processes that share one limit · window_s: of a limit · pause_s: before the second restart of a process within
    the window; doubled before each further one. The first one comes at once.
    """

    def __init__(self, window_s: float, pause_s: float) -> None:
        self._window_s, self._pause_s = window_s, pause_s
        self._made: dict[str, list[tuple[float, str]]] = {}  # kind → (time, name) within the window
        self._due: dict[str, tuple[float, Callable[[], None]]] = {}

    def plan(self, name: str, kind: str, most: int, now: float) -> Restart:
        """The next restart of a process that has died now; it counts as made."""
        made = [(at, who) for at, who in self._made.get(kind, []) if at > now - self._window_s]
        self._made[kind] = made
        if most == 0:
            return Restart(math.inf, 0, over=True)
        if len(made) >= most:
            made.append((made[-most][0] + self._window_s, name))
            return Restart(made[-1][0], most, over=True)
        before = sum(who == name for _, who in made)
        pause_s = min(self._pause_s * 2.0 ** (before - 1), LONGEST_PAUSE_S) if before else 0.0
        made.append((now + pause_s, name))
        return Restart(now + pause_s, len(made), over=False)

    def put(self, name: str, at: float, start: Callable[[], None]) -> None:
        """Have a process started at a time."""
        self._due[name] = at, start

    def waits(self, name: str) -> bool:
        return name in self._due

    def drop(self, name: str) -> None:
        """A process is not to be started again."""
        self._due.pop(name, None)

    def clear(self) -> None:
        self._due.clear()

    def start_due(self, now: float) -> list[str]:
        """Start those whose time has come. Returns their names."""
        names = [name for name, (at, _) in self._due.items() if at <= now]
        for name in names:
            self._due.pop(name)[1]()
        return names

    def until_next(self, now: float, longest: float) -> float:
        """Seconds until a process is to be started, `longest` at most."""
        return max(0.0, min([longest, *(at - now for at, _ in self._due.values())]))
