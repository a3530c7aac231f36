"""Calls of one function in threads: short calls share a thread, and none waits for a long one while threads are free.

    call ──▸ waiting ──▸ a thread makes call after call ──▸ done ──▸ the event loop: woken once for all that are done
                │
                └ JOIN_S later calls still wait: a thread joins, or as many as have made one call for longer than that,
                  up to `most`

A thread for each call costs two switches between threads and a wake-up of the loop, often for microseconds of work.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from asyncrl.generator.threads import as_failure, begin_in_thread

JOIN_S = 0.002
"""While calls wait, threads join this often."""

PASSES = 8
"""Passes of the event loop until the caller of a late call has begun its next attempt, and some."""


@dataclass(slots=True, eq=False)
class _Call:
    """begun: when a thread began it · value, error: its outcome, which `result` has once the loop knows it"""

    function: Callable[[], Any]
    result: asyncio.Future[Any]
    begun: float = 0.0
    value: Any = None
    error: Exception | None = None


class CallThreads:
    """Up to `most` calls at once, in daemon threads, which get `name`. One event loop at a time makes calls.

    A call that is given up, or that takes longer than `deadline_s`, leaves its thread behind and its place to
    the next one, beyond `most`: a call that hangs blocks neither others nor the end of the process.
    """

    def __init__(self, name: str, most: int, deadline_s: float) -> None:
        self._name, self._most, self._deadline_s = name, most, deadline_s
        self._lock = threading.Lock()  # of the next four
        self._threads = 0
        self._waiting: deque[_Call] = deque()
        self._under_way: dict[_Call, None] = {}  # as they began
        self._done: list[_Call] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._look: asyncio.TimerHandle | None = None

    @property
    def under_way(self) -> int:
        """Calls that have begun and not ended, without those given up."""
        return len(self._under_way)

    def begin(self, function: Callable[[], Any], first: bool = False) -> asyncio.Future[Any]:
        """Begins a call. `cancel` of the result gives it up. first: before all calls that wait.

        The result raises TimeoutError `deadline_s` after a thread began the call; the function's error, as `as_failure`
        changes it; and RuntimeError if the machine has no thread for it.
        """
        loop = asyncio.get_running_loop()
        call = _Call(function, loop.create_future())
        call.result.add_done_callback(lambda result: self._give_up(call) if result.cancelled() else None)
        with self._lock:
            if loop is not self._loop:
                self._forget_loop_before(loop)
            (self._waiting.appendleft if first else self._waiting.append)(call)
            if not self._threads and not self._join():
                self._waiting.remove(call)
                call.result.set_exception(RuntimeError("the machine has no more threads"))
        self._look_in(JOIN_S)
        return call.result

    def _forget_loop_before(self, loop: asyncio.AbstractEventLoop) -> None:
        """Under the lock. It has ended, with its timers and all that was awaited in it."""
        self._loop, self._look = loop, None
        self._threads -= len(self._under_way)
        self._waiting.clear()
        self._under_way.clear()
        self._done.clear()

    # ---- on the event loop

    def _look_in(self, seconds: float) -> None:
        """Have `_look_at_all` called by then."""
        loop = asyncio.get_running_loop()
        if self._look is not None:
            if self._look.when() <= loop.time() + seconds:
                return
            self._look.cancel()
        self._look = loop.call_later(seconds, self._look_at_all)

    def _look_at_all(self) -> None:
        """Give up calls that take too long, and let threads join if others wait."""
        self._look, now = None, time.monotonic()
        with self._lock:
            late = [call for call in self._under_way if now >= call.begun + self._deadline_s]
        for call in late:
            self._free(call)
            if not call.result.done():
                call.result.set_exception(TimeoutError())
        if late:
            self._look_behind_callers(PASSES)
            return
        with self._lock:
            long = sum(now >= call.begun + JOIN_S for call in self._under_way)
            for _ in range(min(len(self._waiting), max(1, long), self._most - self._threads)):
                self._join()
            oldest = next(iter(self._under_way), None)
            may_join = self._waiting and (self._threads < self._most or oldest is None)
        if may_join:
            self._look_in(JOIN_S)
        elif oldest is not None:
            self._look_in(max(JOIN_S, oldest.begun + self._deadline_s - now))

    def _look_behind_callers(self, passes: int) -> None:
        """Look after so many passes of the loop: the next attempt of a caller whose call was late has its place."""
        if passes:
            asyncio.get_running_loop().call_soon(self._look_behind_callers, passes - 1)
        else:
            self._look_in(0.0)

    def _give_up(self, call: _Call) -> None:
        self._free(call)
        self._look_behind_callers(0)

    def _free(self, call: _Call) -> None:
        with self._lock:
            if call in self._under_way:
                del self._under_way[call]
                self._threads -= 1

    def _settle(self) -> None:
        with self._lock:
            done, self._done = self._done, []
        for call in done:
            if call.result.done():
                continue
            if call.error is None:
                call.result.set_result(call.value)
            else:
                call.result.set_exception(call.error)

    # ---- in the threads

    def _join(self) -> bool:
        """Under the lock. Whether a thread has joined."""
        try:
            begin_in_thread(self._make_calls)
        except RuntimeError:  # the machine has no more
            return False
        self._threads += 1
        return True

    def _make_calls(self) -> None:
        """Until none waits, or the last one was given up."""
        threading.current_thread().name = self._name  # shows in dumps of a process that hangs
        while (call := self._next()) is not None:
            try:
                call.value = call.function()
            except BaseException as raised:
                call.error = as_failure(raised)
            if not self._end(call):
                return

    def _next(self) -> _Call | None:
        with self._lock:
            while self._waiting:
                call = self._waiting.popleft()
                if not call.result.done():
                    call.begun = time.monotonic()
                    self._under_way[call] = None
                    return call
            self._threads -= 1
            return None

    def _end(self, call: _Call) -> bool:
        """Whether this thread still has its place."""
        with self._lock:
            if call not in self._under_way:
                return False
            del self._under_way[call]
            self._done.append(call)
            wake = len(self._done) == 1
        if wake:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                call.result.get_loop().call_soon_threadsafe(self._settle)
        return True
