"""Two standstills that no deadline of a request ends: of the engine as a whole, and of the event loop.

engine      no token of any sample, and no end of a flip     `EngineWatch`: an error that names what did not come
event loop  code of the user blocks it, as `time.sleep`      `LoopWatch`: a thread names the line and ends the process

Both wait for generator.progress_deadline_s. Without the second one the generator's heartbeats would stop as well: its
leases go to others, and it would never end.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Self

from asyncrl.errors import DeadlineError
from asyncrl.generator.engines.engine import Engine
from asyncrl.types import NO_VERSION

TOKEN_S = 1.0
"""Longest time of one token, for engines that count tokens only when their sample ends."""

LONGEST_LOOK_S = 5.0
"""Most seconds that count between two looks. If more have passed, the whole process was stopped."""


class Standstill:
    """Seconds since the last progress, as far as looks from time to time can tell."""

    def __init__(self) -> None:
        self.seconds = self._looked = 0.0

    def look(self, now: float, progressed: bool) -> None:
        """progressed: since the look before"""
        passed_s, self._looked = min(now - self._looked, LONGEST_LOOK_S), now
        self.seconds = 0.0 if progressed else self.seconds + passed_s


class EngineWatch:
    """Waits for the next progress of one engine. who: its generator

    An engine counts as progressing without samples, without weights, and while it waits for its turn on the device:
    samples that wait for the learner are not its fault.
    """

    def __init__(self, who: str, engine: Engine, deadline_s: float) -> None:
        self._who, self._engine, self._deadline_s = who, engine, deadline_s
        self._before: tuple[float, bool] | None = None
        self._still = Standstill()

    def look(self, now: float, stats: Mapping[str, float], flipping: bool) -> None:
        """stats: of the engine, now. Raises DeadlineError."""
        before, self._before = self._before, (stats["tokens"], flipping)
        busy = stats["running"] + stats["waiting"] > 0 and self._engine.version != NO_VERSION
        self._still.look(
            now, progressed=before != self._before or not (busy or flipping) or bool(stats.get("asleep"))
        )
        waited_s = self._still.seconds
        if waited_s > 0 and waited_s >= self._deadline_s + TOKEN_S * stats.get("uncounted", 0.0):
            version = self._engine.version
            raise DeadlineError(
                self._who,
                f"its engine ({type(self._engine).__name__})",
                f"the end of a flip from version {version}" if flipping else f"a token of version {version}",
                waited_s,
                f"{stats['running']:.0f} samples run, {stats['waiting']:.0f} wait for a slot; the limit is "
                f"generator.progress_deadline_s={self._deadline_s:g}",
            )


class LoopWatch:
    """Watches the running event loop while it is entered. who: the generator

    After each look its thread lets the loop `tick`. A loop that does not come to that stands still.
    """

    def __init__(self, who: str, deadline_s: float) -> None:
        self._who, self._deadline_s = who, deadline_s
        self._ticked, self._still = True, Standstill()
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
        self._still.look(now, progressed=self._ticked)
        self._ticked = False
        return self._still.seconds >= self._deadline_s

    def _run(self) -> None:
        while not self._closing.wait(min(LONGEST_LOOK_S, self._deadline_s / 4)):
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
            self._still.seconds,
            f"{where}; await, or use a thread; the limit is generator.progress_deadline_s={self._deadline_s:g}",
        )
        print(f"asyncrl generator: {error}", file=sys.stderr, flush=True)
        os._exit(DeadlineError.exit_code)
