"""So many at once, and of those who wait the lowest ordinal first."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count


class PrioritySemaphore:
    """`ask` for one, await it, `give_back`; whoever stops waiting says `leave`."""

    def __init__(self, places: int) -> None:
        self._free = self._all = places
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()

    @property
    def taken(self) -> int:
        return self._all - self._free

    @property
    def waiting(self) -> int:
        return sum(not place.done() for _, _, place in self._waiting)

    def ask(self, ordinal: int) -> asyncio.Future[None]:
        """Done when the place is there. Cancelling it is as good as `leave`."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._free:
            self._free -= 1
            place.set_result(None)
        else:
            heapq.heappush(self._waiting, (ordinal, next(self._numbers), place))
        return place

    def leave(self, place: asyncio.Future[None]) -> None:
        """Of no use any more, whether it came or not."""
        if place.done() and not place.cancelled():
            self.give_back()
        else:
            place.cancel()

    def give_back(self) -> None:
        while self._waiting:
            _, _, place = heapq.heappop(self._waiting)
            if not place.done():
                place.set_result(None)
                return
        self._free += 1
