"""The requests that wait at the broker, and the order in which they are tried when something changes. Pure.

    wait key        the thing that has to change before they can be answered: a stream, or the registry
     └ queue        requests for the same thing: if the first cannot be answered, none of them can
        └ client    in turns: a client with many waiting requests gets no more than one with a single request
           └ request    in the order of arrival

A change of a wait key costs one attempt per queue and one per reply, however many requests wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from msgspec.structs import replace

from asyncrl.errors import RefusedError
from asyncrl.queue.broker.queue_state import SessionRequest

CLIENT_BYTES, ALL_BYTES = 3 << 25, 1 << 28
"""Limits on the memory of requests that wait, of one client and in all: tasks may wait for a stream to be opened."""

SMALL_BYTES = 1 << 13
"""A smaller request waits in any case; a client has no more than 64 of them."""

RequestKey = tuple[bytes, int]
"""A request at the broker: the identity of its client, and the client's number for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """A request that waits until `until`.

    nbytes: of memory · same: equal for requests that are answerable under the same conditions
    """

    identity: bytes
    number: int
    request: SessionRequest
    wait_key: str
    until: float
    nbytes: int = 0
    same: Hashable = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "same", _same(self.request))

    @property
    def key(self) -> RequestKey:
        return self.identity, self.number


class LongPoll:
    def __init__(self) -> None:
        self._waiters: dict[RequestKey, Waiter] = {}
        self._queues: dict[str, OrderedDict[Hashable, WaitQueue]] = {}
        self._waiting: Counter[tuple[str, str]] = Counter()  # (wait key, verb) -> how many wait
        self._arrivals = itertools.count()
        self._arrived: dict[RequestKey, int] = {}
        self._deadlines: list[tuple[float, int, RequestKey]] = []  # heap; has some that do not wait any more
        self._bytes: Counter[bytes] = Counter()  # by client
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._waiters

    @property
    def keys(self) -> list[str]:
        return list(self._queues)

    def has(self, wait_key: str, verb: str) -> bool:
        return self._waiting[wait_key, verb] > 0

    def add(self, waiter: Waiter) -> None:
        """RefusedError 'full': the requests that wait take too much memory. Small ones always have room."""
        self._check_room(waiter)
        self._bytes[waiter.identity] += waiter.nbytes
        self.nbytes += waiter.nbytes
        self._waiters[waiter.key], self._arrived[waiter.key] = waiter, next(self._arrivals)
        queues = self._queues.setdefault(waiter.wait_key, OrderedDict())
        queues.setdefault(waiter.same, WaitQueue()).add(waiter)
        self._waiting[waiter.wait_key, waiter.request.request.verb] += 1
        heapq.heappush(self._deadlines, (waiter.until, self._arrived[waiter.key], waiter.key))

    def remove(self, key: RequestKey) -> None:
        """Idempotent."""
        waiter = self._waiters.pop(key, None)
        if waiter is None:
            return
        del self._arrived[key]
        self.nbytes -= waiter.nbytes
        self._bytes[waiter.identity] -= waiter.nbytes
        if not self._bytes[waiter.identity]:
            del self._bytes[waiter.identity]
        queues = self._queues[waiter.wait_key]
        if not queues[waiter.same].remove(waiter):
            del queues[waiter.same]
        if not queues:
            del self._queues[waiter.wait_key]
        self._waiting[waiter.wait_key, waiter.request.request.verb] -= 1
        if len(self._deadlines) > 2 * len(self._waiters) + 64:
            self._deadlines = [entry for entry in self._deadlines if self._waits(entry)]
            heapq.heapify(self._deadlines)

    def offer(self, wait_key: str, answer: Callable[[Waiter], bool]) -> int:
        """Let the queues of a wait key have their turns until none can be answered. Returns how many requests were.

        answer: returns whether it could answer the request. The queue that was served last is tried last the next time.
        """
        queues = self._queues.get(wait_key, OrderedDict())
        going, answered = list(queues), 0
        while going:
            served = []
            for same in going:
                waiter = queues[same].first()
                if not answer(waiter):
                    continue
                queues[same].next_client()
                queues.move_to_end(same)
                self.remove(waiter.key)
                answered += 1
                served.append(same)
            going = [same for same in served if same in queues]
        return answered

    def late(self, now: float) -> list[Waiter]:
        """Those whose wait is over, once; they still wait, for their last reply."""
        late: list[Waiter] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)
            if self._waits(entry):
                late.append(self._waiters[entry[2]])
        return late

    def _waits(self, entry: tuple[float, int, RequestKey]) -> bool:
        return self._arrived.get(entry[2]) == entry[1]

    def _check_room(self, waiter: Waiter) -> None:
        if waiter.nbytes <= SMALL_BYTES:
            return
        for whose, held, most in (
            ("this client", self._bytes[waiter.identity], CLIENT_BYTES),
            ("all clients", self.nbytes, ALL_BYTES),
        ):
            if held + waiter.nbytes > most:
                rule = f"requests of {whose} that wait take {held} bytes; {most} are allowed"
                raise RefusedError("full", f"no room for a request of {waiter.nbytes} bytes: {rule}")


class WaitQueue:
    """Requests for the same thing, by client; the clients take turns."""

    def __init__(self) -> None:
        self._clients: OrderedDict[bytes, deque[Waiter]] = OrderedDict()

    def add(self, waiter: Waiter) -> None:
        self._clients.setdefault(waiter.identity, deque()).append(waiter)

    def first(self) -> Waiter:
        return next(iter(self._clients.values()))[0]

    def next_client(self) -> None:
        self._clients.move_to_end(next(iter(self._clients)))

    def remove(self, waiter: Waiter) -> bool:
        """Returns whether other requests are left."""
        waiting = self._clients[waiter.identity]
        waiting.remove(waiter)
        if not waiting:
            del self._clients[waiter.identity]
        return bool(self._clients)


def _same(incoming: SessionRequest) -> Hashable:
    """Equal for requests of which either all or none can be answered; how many and how long makes no difference."""
    changes: dict[str, object] = {"wait_s": 0.0}
    if hasattr(incoming.request, "most"):
        changes["most"] = min(incoming.request.most, 1)
    return incoming.run, replace(incoming.request, **changes)
