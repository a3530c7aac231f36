"""An event loop on a virtual clock: it never waits, time jumps to whatever is due next."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class StuckError(Exception):
    """Everybody waits and nothing is due: the processes wait for each other."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs what real loops run, in an order that depends on nothing but the program.

    >>> async def nap():
    ...     await asyncio.sleep(3600)
    ...     return asyncio.get_running_loop().time()
    >>> loop = VirtualLoop(); loop.run_until_complete(nap()); loop.close()
    3600.0
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._clock_resolution = 1e-9
        self._selector = _Jump(self)

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def _process_events(self, events: list[Any]) -> None:
        """There are no descriptors."""

    def _write_to_self(self) -> None:
        """There is one thread."""


class _Jump(selectors.BaseSelector):
    """In place of a wait for descriptors."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise StuckError
        self._loop.advance(timeout)
        return []

    def register(self, *_: Any) -> Any: ...

    def unregister(self, *_: Any) -> Any: ...

    def get_map(self) -> Any: ...
