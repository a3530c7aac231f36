"""Blocking functions off the event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class OneThread:
    """Calls in one thread, in their order. A call that hangs does not keep the process from its end."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closed = False

    async def __call__(self, function: Callable[..., Result], *args: Any) -> Result:
        """Raises the function's error, as `as_failure` changes it. If cancelled before its turn, it is not called."""
        if self._closed:
            raise RuntimeError(f"the thread {self._thread.name!r} was closed")
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()

        def call() -> None:
            if not result.cancelled():
                _call(partial(function, *args), loop, result)

        self._calls.put(call)
        if self._thread.ident is None:
            self._thread.start()
        return await result

    def close(self, wait_s: float = 0.0) -> bool:
        """No call begins any more. Returns whether the call under way has ended within `wait_s`."""
        self._closed = True
        self._calls.put(None)
        if self._thread.ident is not None:
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def as_failure(raised: BaseException) -> Exception:
    """An error that fails one call alone: one that would end the process (SystemExit), cancel the caller
    (CancelledError) or does not fit into a future (StopIteration) becomes the cause of a RuntimeError.

    >>> as_failure(SystemExit(3)), as_failure(ValueError("no"))
    (RuntimeError('SystemExit(3)'), ValueError('no'))
    """
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    error = RuntimeError(repr(raised)).with_traceback(raised.__traceback__)
    error.__cause__ = raised
    return error


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in an idle daemon thread. A caller that gives up leaves the thread behind: a call that hangs
    blocks neither other calls nor the end of the process. Raises the function's error, as `as_failure` changes it."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        # The name shows in dumps of a process that hangs.
        threading.current_thread().name = getattr(function, "__name__", "call")
        _call(partial(function, *args, **kwargs), loop, result)

    begin_in_thread(run)
    return await result


def _call(
    function: Callable[[], Result], loop: asyncio.AbstractEventLoop, result: asyncio.Future[Result]
) -> None:
    """Call the function in this thread, and settle the result in its loop, unless the caller has given up."""

    def settle(value: Any, error: BaseException | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    value: Any = None
    error: BaseException | None = None
    try:
        value = function()
    except BaseException as raised:
        error = as_failure(raised)
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(settle, value, error)


_idle: list[SimpleQueue[Callable[[], None]]] = []
"""The queues of threads that wait for a call: starting a thread takes longer than most calls."""

os.register_at_fork(after_in_child=_idle.clear)


def begin_in_thread(call: Callable[[], None]) -> None:
    """Begin a call that raises nothing, in an idle daemon thread."""
    try:
        calls = _idle.pop()
    except IndexError:
        calls = SimpleQueue()
        threading.Thread(target=_serve, args=(calls,), name="calls", daemon=True).start()
    calls.put(call)


def _serve(calls: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        calls.get()()
        _idle.append(calls)
