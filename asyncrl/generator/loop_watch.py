"""Ends a generator whose event loop stands still, e.g. because an environment of the user waits in `time.sleep`.

event loop ── a tick after each look ──▸ a thread ── none for generator.progress_deadline_s ──▸ names the line
                                                                                               ends the process

No deadline within the loop can end such code, and without heartbeats the generator's leases go to others meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from typing import Self

from asyncrl.errors import DeadlineError

LOOK_S = 5.0
"""Longest pause between two looks. No more of it counts: the whole process may have been stopped."""


class LoopWatch:
    """Watches the running event loop while it is entered. who: the generator"""

    def __init__(self, who: str, deadline_s: float) -> None:
        self._who, self._deadline_s = who, deadline_s
        self._ticked, self._looked, self._waited_s = True, 0.0, 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="event loop watch", daemon=True)

    def __enter__(self) -> Self:
        self._loop, self._watched = asyncio.get_running_loop(), threading.get_ident()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()

    def tick(self) -> None:
        """The loop runs."""
        self._ticked = True

    def look(self, now: float) -> bool:
        """Whether no tick has come for too long. now: in seconds"""
        passed_s, self._looked = min(now - self._looked, LOOK_S), now
        self._waited_s = 0.0 if self._ticked else self._waited_s + passed_s
        self._ticked = False
        return self._waited_s >= self._deadline_s

    def _run(self) -> None:
        while not self._closing.wait(min(LOOK_S, self._deadline_s / 4)):
            if self.look(time.monotonic()):
                self._end()
            try:
                self._loop.call_soon_threadsafe(self.tick)
            except RuntimeError:  # it is closed
                return

    def _end(self) -> None:
        """End the process as the error of a deadline does: nothing can be raised in code that blocks."""
        stack = traceback.extract_stack(sys._current_frames().get(self._watched))
        where = "; ".join(f"{each.filename}:{each.lineno} in {each.name}" for each in stack[-1:])
        error = DeadlineError(
            self._who,
            "its event loop",
            "the end of code that blocks it",
            self._waited_s,
            f"{where}; await, or use a thread; the limit is generator.progress_deadline_s={self._deadline_s:g}",
        )
        print(f"asyncrl generator: {error}", file=sys.stderr, flush=True)
        os._exit(DeadlineError.exit_code)
