"""Time in tests: a clock that is turned by hand, and waits for an event by a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

PATIENCE_S = 30.0


class Clock:
    """Stands still until `now` is set."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


async def eventually(look: Callable[[], Any]) -> Any:
    """The first true answer of `look`, which is called in each turn of the event loop. TimeoutError at the deadline."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := look()):
            await asyncio.sleep(0)
    return found
