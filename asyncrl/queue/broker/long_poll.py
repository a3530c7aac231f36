"""The requests that wait at the broker, and whose turn it is when something moves. Pure.

    subject     what has to move before they can be answered: a stream, or the directory
     └ line     requests that ask for the same thing: if the first cannot be answered, none of them can
        └ caller    in turns: who has many requests waiting gets no more than who has one
           └ request    in the order they came

A move of a subject costs one attempt per line and one per answer, however many requests wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from asyncrl.queue.broker.service import Request

WaitKey = tuple[bytes, int]
"""A request at the broker: the identity of its caller, and the caller's number for it."""

SCALARS = (int, float, str, bytes, type(None))


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """A request that waits until `until`. same: what it has in common with the others of its line."""

    identity: bytes
    request_id: int
    request: Request
    subject: str
    until: float
    same: Hashable = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "same", _same(self.request))

    @property
    def key(self) -> WaitKey:
        return self.identity, self.request_id


class LongPoll:
    def __init__(self) -> None:
        self._waiters: dict[WaitKey, Waiter] = {}
        self._lines: dict[str, OrderedDict[Hashable, WaitQueue]] = {}
        self._asking: Counter[tuple[str, str]] = Counter()  # (subject, op) -> how many wait
        self._deadlines: list[tuple[float, int, Waiter]] = []  # heap; holds some that have left
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, key: WaitKey) -> bool:
        return key in self._waiters

    @property
    def subjects(self) -> list[str]:
        return list(self._lines)

    def somebody_asks(self, subject: str, op: str) -> bool:
        return self._asking[subject, op] > 0

    def add(self, waiter: Waiter) -> None:
        self._waiters[waiter.key] = waiter
        self._lines.setdefault(waiter.subject, OrderedDict()).setdefault(waiter.same, WaitQueue()).add(waiter)
        self._asking[waiter.subject, waiter.request.op] += 1
        heapq.heappush(self._deadlines, (waiter.until, next(self._arrivals), waiter))

    def remove(self, key: WaitKey) -> None:
        """Again, or of a request that does not wait: nothing."""
        waiter = self._waiters.pop(key, None)
        if waiter is None:
            return
        lines = self._lines[waiter.subject]
        if not lines[waiter.same].remove(waiter):
            del lines[waiter.same]
        if not lines:
            del self._lines[waiter.subject]
        self._asking[waiter.subject, waiter.request.op] -= 1
        if len(self._deadlines) > 2 * len(self._waiters) + 64:
            self._deadlines = [entry for entry in self._deadlines if self._waits(entry[2])]
            heapq.heapify(self._deadlines)

    def offer(self, subject: str, answer: Callable[[Waiter], bool]) -> int:
        """Let the lines of a subject have their turns until none can be answered; how many were.

        `answer` says whether it could answer. The line that was served last is tried last the next time.
        """
        lines = self._lines.get(subject, OrderedDict())
        going, answered = list(lines), 0
        while going:
            served = []
            for same in going:
                waiter = lines[same].first()
                if not answer(waiter):
                    continue
                lines[same].next_caller()
                lines.move_to_end(same)
                self.remove(waiter.key)
                answered += 1
                served.append(same)
            going = [same for same in served if same in lines]
        return answered

    def late(self, now: float) -> list[Waiter]:
        """Those whose wait is over, once; they still wait, for their last answer."""
        late: list[Waiter] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            waiter = heapq.heappop(self._deadlines)[2]
            if self._waits(waiter):
                late.append(waiter)
        return late

    def _waits(self, waiter: Waiter) -> bool:
        return self._waiters.get(waiter.key) is waiter


class WaitQueue:
    """Requests for the same thing, by caller; the callers take turns."""

    def __init__(self) -> None:
        self._callers: OrderedDict[bytes, deque[Waiter]] = OrderedDict()

    def add(self, waiter: Waiter) -> None:
        self._callers.setdefault(waiter.identity, deque()).append(waiter)

    def first(self) -> Waiter:
        return next(iter(self._callers.values()))[0]

    def next_caller(self) -> None:
        self._callers.move_to_end(next(iter(self._callers)))

    def remove(self, waiter: Waiter) -> bool:
        """Whether somebody is left."""
        waiting = self._callers[waiter.identity]
        waiting.remove(waiter)
        if not waiting:
            del self._callers[waiter.identity]
        return bool(self._callers)


def _same(request: Request) -> Hashable:
    """Equal for requests of which either all or none can be answered; how many or how long makes no difference."""
    args = {name: value for name, value in request.args.items() if name != "wait_s"}
    if type(args.get("most")) is int:
        args["most"] = min(args["most"], 1)
    if not all(isinstance(value, SCALARS) for value in args.values()):
        return object()
    return request.run, request.op, frozenset(args.items())
