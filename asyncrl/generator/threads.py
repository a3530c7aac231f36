"""Blocking functions off the event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class OneThread:
    """Calls in one thread, in their order."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def __call__(self, function: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    def close(self) -> None:
        """Does not wait for the call under way."""
        self._executor.shutdown(wait=False)


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

    def settle(value: Any, error: BaseException | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def run() -> None:
        value: Any = None
        error: BaseException | None = None
        # The name shows in dumps of a process that hangs.
        threading.current_thread().name = getattr(function, "__name__", "call")
        try:
            value = function(*args, **kwargs)
        except BaseException as raised:
            error = as_failure(raised)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    _begin(run)
    return await result


_idle: list[SimpleQueue[Callable[[], None]]] = []
"""The queues of threads that wait for a call: starting a thread takes longer than most calls."""

os.register_at_fork(after_in_child=_idle.clear)


def _begin(call: Callable[[], None]) -> None:
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
