"""A client's side of the conversation with the broker, without its socket. Pure: messages and times in, messages out.

    request ──▸ backlog ── credit ──▸ sent ──┬── reply ─────▸ Outcome(value, or the error in it)
                                       ▴     ├── deadline ──▸ Outcome(DeadlineError)
                                       └─────┴── no reply for RESEND_S, or the connection is new: sent again,
                                                 which is harmless, as the broker handles a request once
                                                 (`renew_due` asks for a new connection)

Every message lists the requests that are still waited for, which is all that the broker needs in order to forget the
others (envelope.py). Credit bounds the requests under way; those beyond it wait here, not at the broker.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from asyncrl.errors import DeadlineError, RefusedError, RunClosedError, WireError
from asyncrl.queue.protocol.requests import Request, pack_request
from asyncrl.queue.wire import envelope, wire
from asyncrl.queue.wire.envelope import MAX_REQUESTS, UNKNOWN, Message

RESEND_S = 5.0
"""After this long without a reply a request is sent again."""

RENEW_S = 15.0
"""After this long without a reply that is due, and without any other message, the connection is renewed; the second
time after twice as long, and so on."""

BUSY_S = 0.2
"""After this long a request that was refused as 'busy' is sent again."""

CREDIT_REQUESTS = MAX_REQUESTS
CREDIT_BYTES = 1 << 28
"""Requests, and bytes of their payloads, that may be under way at once; one payload may be larger."""

UNDO_S = 30.0
"""Deadline of a request that gives a grant back."""

HEAD_BYTES = 4096
"""More than an envelope has besides its arguments."""

REMEMBERED = 256
"""Abandoned requests whose late grant would still be given back."""

Undo = Callable[[Any], "Request | None"]
"""From the value of a grant to the request that gives it back; None: nothing to do."""


class ReplyValue(NamedTuple):
    """A reply: its value, and the payload frames behind it."""

    value: Any
    frames: Sequence[Any]


class Outcome(NamedTuple):
    """The result of a request. undo: returns a grant whose caller was cancelled before the reply came."""

    number: int
    result: ReplyValue | Exception
    undo: Undo | None = None


@dataclass(slots=True)
class PendingRequest:
    """A request without a reply. packed: the request · park_until: when the broker must reply ·
    resend_at: when it is sent again"""

    number: int
    request: Request
    packed: bytes
    frames: Sequence[wire.Buffer]
    nbytes: int
    seconds: float
    deadline: float
    undo: Undo | None
    park_until: float | None = None
    resend_at: float = 0.0


class Session:
    """One life of a client. name: 'who/unique', to which the broker's leases belong."""

    def __init__(self, run: str, name: str, address: str) -> None:
        self.run, self.name, self.address = run, name, address
        self._ids = itertools.count(1)
        self._backlog: deque[PendingRequest] = deque()  # without credit yet
        self._pending: dict[int, PendingRequest] = {}
        self._bytes = 0  # of what is pending
        self._newest = 0  # highest number that was sent
        self._abandoned: OrderedDict[int, Undo] = OrderedDict()
        self._due: deque[int] = deque()  # to be sent by `outgoing`
        self._next_time = math.inf  # nothing is due before
        self._read_at = -math.inf  # when a message could last be read, or the connection was new
        self._patience_s = RENEW_S
        self._statement_due = False  # the broker needs to know that something is not waited for any more
        self._complaint = ""  # the broker's last complaint about a message that it could not read

    # ------------------------------------------------------------------ the caller

    def request(
        self,
        request: Request,
        frames: Sequence[wire.Buffer],
        deadline_s: float,
        now: float,
        undo: Undo | None = None,
    ) -> int:
        """Add a request; its Outcome comes out of `receive` or `tick`. Returns its number.

        deadline_s: begins after the `wait_s` for which the broker may park it · undo: gives back a grant that comes
        when nobody waits for it any more. WireError: it is larger than a message may be.
        """
        park_until = now + request.wait_s if request.wait_s else None
        seconds = request.wait_s + deadline_s
        packed = pack_request(request)
        nbytes = _checked_size(request.verb, packed, frames)
        pending = PendingRequest(
            next(self._ids), request, packed, frames, nbytes, seconds, now + seconds, undo, park_until
        )
        self._backlog.append(pending)
        self._next_time = min(self._next_time, pending.deadline)
        self._give_credit(now)
        return pending.number

    def abandon(self, number: int) -> None:
        """Nobody waits for this request any more. A grant that its reply brings is given back."""
        pending = self._pending.get(number)
        if pending is None:
            self._backlog = deque(pending for pending in self._backlog if pending.number != number)
            return
        if pending.undo is not None:
            self._abandoned[number] = pending.undo
            if len(self._abandoned) > REMEMBERED:
                self._abandoned.popitem(last=False)
        self._end(pending)
        self._statement_due = True

    def abandon_all(self) -> None:
        for number in [*(pending.number for pending in self._backlog), *self._pending]:
            self.abandon(number)

    # ------------------------------------------------------------------ the wire

    def receive(self, frames: Sequence[Any], now: float) -> list[Outcome]:
        """A message of the broker. Replies to unknown or already answered requests are ignored."""
        outcomes: list[Outcome] = []
        try:
            replies = envelope.unpack_replies(frames)
            self._read_at, self._patience_s = now, RENEW_S
            for number, value, error, payload in replies:
                result = ReplyValue(value, payload) if error is None else _raised(*error)
                outcomes += self._replied(number, result, now)
        except (WireError, TypeError) as unreadable:
            self._complaint = f"its last message could not be read: {unreadable}"
        return outcomes

    def _replied(self, number: int, result: ReplyValue | Exception, now: float) -> list[Outcome]:
        pending = self._pending.get(number)
        if pending is None:
            self._unexpected(number, result, now)
            return []
        if isinstance(result, RefusedError) and result.reason == "busy":
            pending.resend_at = now + BUSY_S
            self._next_time = min(self._next_time, pending.resend_at)
            return []
        self._end(pending)
        self._give_credit(now)
        return [Outcome(number, result, pending.undo)]

    def tick(self, now: float) -> list[Outcome]:
        """Handle deadlines, and send overdue requests again."""
        outcomes = []
        for pending in [*self._pending.values(), *self._backlog]:
            if pending.deadline <= now:
                self.abandon(pending.number)
                outcomes.append(Outcome(pending.number, self._late(pending)))
            elif pending.number in self._pending and pending.resend_at <= now:
                self._send(pending, now)
        self._give_credit(now)
        self._find_next_time()
        return outcomes

    def renew_due(self, now: float) -> bool:
        """Whether the connection brings nothing, though something is due: it may look whole and pass nothing on. The
        next one gets twice the time: a large message may take longer than this one had."""
        owed = (p.park_until or p.deadline - p.seconds for p in self._pending.values())
        due = max(self._read_at, min(owed, default=math.inf)) + self._patience_s <= now
        if due:
            self._read_at = now
            self._patience_s *= 2
        return due

    def reconnected(self, now: float) -> None:
        """All requests under way may be lost: send them again."""
        self._read_at = now
        for pending in self._pending.values():
            self._send(pending, now)
        self._find_next_time()

    def outgoing(self) -> list[Message]:
        """The messages that are to be sent now: one, unless it would be too large."""
        due = [pending for number in self._due if (pending := self._pending.get(number)) is not None]
        statement, self._statement_due = self._statement_due and self._newest > 0, False
        self._due.clear()
        if not due and not statement:
            return []
        requests = [envelope.WireRequest(p.number, p.request.verb, p.packed, p.frames) for p in due]
        return envelope.pack_calls(
            envelope.ClientMessage(self._newest, list(self._pending), self.run, self.name, requests)
        )

    def next_time(self) -> float | None:
        """When `tick` should be called next. If nothing is due then, `tick` computes a later time."""
        return self._next_time if self._pending or self._backlog else None

    def first_deadline(self) -> float | None:
        """The first deadline of a request without a reply; None without any."""
        return min((pending.deadline for pending in [*self._pending.values(), *self._backlog]), default=None)

    def _find_next_time(self) -> None:
        """Compute the next time exactly. Elsewhere it only comes nearer: a scan for every message is too slow."""
        times = [min(pending.resend_at, pending.deadline) for pending in self._pending.values()]
        self._next_time = min([*times, *(pending.deadline for pending in self._backlog)], default=math.inf)

    # ------------------------------------------------------------------ credit

    def _give_credit(self, now: float) -> None:
        while self._backlog and len(self._pending) < CREDIT_REQUESTS:
            pending = self._backlog[0]
            if self._bytes and self._bytes + pending.nbytes > CREDIT_BYTES:
                return
            self._backlog.popleft()
            self._pending[pending.number] = pending
            self._bytes += pending.nbytes
            self._newest = pending.number
            self._send(pending, now)

    def _send(self, pending: PendingRequest, now: float) -> None:
        pending.resend_at = now + RESEND_S
        if pending.park_until is not None:  # a new broker must not begin to wait from the start
            left = max(0.0, pending.park_until - now)
            if left < pending.request.wait_s:
                pending.request = replace(pending.request, wait_s=left)
                pending.packed = pack_request(pending.request)
        self._next_time = min(self._next_time, pending.resend_at, pending.deadline)
        if pending.number not in self._due:
            self._due.append(pending.number)

    def _end(self, pending: PendingRequest) -> None:
        del self._pending[pending.number]
        self._bytes -= pending.nbytes
        if not self._pending and not self._backlog:
            self._next_time = math.inf

    # ------------------------------------------------------------------ messages

    def _unexpected(self, number: int, result: ReplyValue | Exception, now: float) -> None:
        """A grant that nobody waits for, a second reply, or a complaint about an unreadable message."""
        # Kept: a request that was sent twice may be refused as busy and then granted, or granted by two brokers.
        undo = self._abandoned.get(number)
        if undo is not None and isinstance(result, ReplyValue):
            self.undo(undo, result.value, now)
        elif number == UNKNOWN and isinstance(result, WireError):
            self._complaint = f"it says: {result}"

    def undo(self, undo: Undo, value: Any, now: float) -> None:
        """Give a grant back. If this request is lost too, the lease ends by itself, since nobody renews it."""
        with suppress(KeyError, TypeError, ValueError):
            request = undo(value)
            if request is not None:
                self.request(request, (), UNDO_S, now)

    def _late(self, pending: PendingRequest) -> DeadlineError:
        who, what = self.name.rsplit("/", 1)[0], f"an answer to '{pending.request.verb}'"
        if self._complaint:
            what += f" ({self._complaint})"
        return DeadlineError(who, f"the queue at {self.address}", what, pending.seconds)


def _checked_size(op: str, packed: bytes, frames: Sequence[wire.Buffer]) -> int:
    """Bytes of the payload. WireError for a message that the broker would not read."""
    head, largest = len(packed) + HEAD_BYTES, max(map(len, frames), default=0)
    if head > wire.MAX_ENVELOPE_BYTES or largest > wire.MAX_FRAME_BYTES or len(frames) >= wire.MAX_FRAMES:
        raise WireError(
            f"'{op}' is larger than a message may be: arguments of {head} bytes ({wire.MAX_ENVELOPE_BYTES} are "
            f"allowed), {len(frames)} frames ({wire.MAX_FRAMES}) of up to {largest} bytes ({wire.MAX_FRAME_BYTES})"
        )
    return sum(map(len, frames))


def _raised(kind: str, reason: str, detail: str) -> Exception:
    if kind == "closed":
        return RunClosedError(detail)
    return RefusedError(reason, detail) if kind == "refused" else WireError(detail)
