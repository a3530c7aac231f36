"""A semaphore that admits waiters in the order of their priorities, lowest first."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count


class PrioritySemaphore:
    """`request` a slot, await it, `release` it. `cancel` a slot that is not used after all."""

    def __init__(self, slots: int) -> None:
        self._free = self._all = slots
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()

    @property
    def taken(self) -> int:
        return self._all - self._free

    @property
    def waiting(self) -> int:
        return sum(not slot.done() for _, _, slot in self._waiting)

    def request(self, priority: int) -> asyncio.Future[None]:
        """Done when the slot is free. Cancelling the future has the effect of `cancel`."""
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._free:
            self._free -= 1
            slot.set_result(None)
        else:
            heapq.heappush(self._waiting, (priority, next(self._numbers), slot))
        return slot

    def cancel(self, slot: asyncio.Future[None]) -> None:
        """Stop waiting for a slot, or release one that was granted meanwhile."""
        if slot.done() and not slot.cancelled():
            self.release()
        else:
            slot.cancel()

    def release(self) -> None:
        while self._waiting:
            _, _, slot = heapq.heappop(self._waiting)
            if not slot.done():
                slot.set_result(None)
                return
        self._free += 1
