"""A client's side of the conversation with the broker, without its socket. Pure: messages and times in, messages out.

    ask ──▸ line ── credit ──▸ sent ──┬── reply ─────▸ Outcome(value, or the error that it says)
                                ▴     ├── deadline ──▸ Outcome(DeadlineError)
                                └─────┴── no reply for RESEND_S, or the connection is new: sent again,
                                          which is harmless, as the broker does a request once

Every message says which requests are still waited for, which is all that the broker needs in order to forget the
others (client_state.py). Credit bounds what is under way; what is beyond it waits here, not at the broker.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl.errors import DeadlineError, RefusedError, RunClosedError, WireError
from asyncrl.queue.wire import envelope, wire
from asyncrl.queue.wire.client_state import MAX_REQUESTS, UNKNOWN, Message

RESEND_S = 5.0
"""After this long without an answer a request is sent again."""

BUSY_S = 0.2
"""After this long a request that was refused as 'busy' is sent again."""

CREDIT_REQUESTS = MAX_REQUESTS
CREDIT_BYTES = 1 << 28
"""Requests, and bytes of their payloads, that may be under way at once; one payload may be larger."""

UNDO_S = 30.0
"""How long it is tried to give something back."""

HEAD_BYTES = 4096
"""More than an envelope has besides its arguments."""

REMEMBERED = 256
"""Abandoned requests whose late answer would still be undone."""

Undo = Callable[[Any], "tuple[str, dict[str, Any]] | None"]
"""From the value that a request was granted to the request (op, args) that takes it back; None: nothing to do."""


class ReplyValue(NamedTuple):
    """A reply: its value, and the payload frames behind it."""

    value: Any
    frames: Sequence[Any]


class Outcome(NamedTuple):
    """How a request ended. undo: for a grant, whose caller has left by then."""

    request_id: int
    result: ReplyValue | Exception
    undo: Undo | None = None


@dataclass(slots=True)
class PendingRequest:
    """A request without an answer. packed: its arguments · park_until: when the broker must answer ·
    resend_at: when it is sent again"""

    request_id: int
    op: str
    args: Mapping[str, Any]
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
        self._line: deque[PendingRequest] = deque()  # without credit yet
        self._asked: dict[int, PendingRequest] = {}
        self._bytes = 0  # of what is asked
        self._newest = 0  # highest number that was sent
        self._abandoned: OrderedDict[int, Undo] = OrderedDict()
        self._due: deque[int] = deque()  # to be sent by `outgoing`
        self._next_time = math.inf  # nothing is due before
        self._tell = False  # the broker should hear that something is not waited for any more
        self._complaint = ""  # what the broker last said about a message that it could not read

    # ------------------------------------------------------------------ the caller

    def ask(
        self,
        op: str,
        args: Mapping[str, Any],
        frames: Sequence[wire.Buffer],
        wait_s: float,
        deadline_s: float,
        now: float,
        undo: Undo | None = None,
    ) -> int:
        """One request; its Outcome comes out of `receive` or `tick`. Returns its number.

        wait_s: how long the broker may park it; the deadline begins after that. undo: for a grant that comes when
        nobody waits for it any more. WireError if it is larger than a message may be.
        """
        args, park_until = ({**args, "wait_s": wait_s}, now + wait_s) if wait_s else (args, None)
        seconds = wait_s + deadline_s
        packed = wire.pack_value(args)
        nbytes = _checked_size(op, packed, frames)
        asked = PendingRequest(
            next(self._ids), op, args, packed, frames, nbytes, seconds, now + seconds, undo, park_until
        )
        self._line.append(asked)
        self._next_time = min(self._next_time, asked.deadline)
        self._give_credit(now)
        return asked.request_id

    def abandon(self, request_id: int) -> None:
        """Nobody waits for this request any more. What it was granted meanwhile is given back when its reply comes."""
        asked = self._asked.get(request_id)
        if asked is None:
            self._line = deque(waiting for waiting in self._line if waiting.request_id != request_id)
            return
        if asked.undo is not None:
            self._abandoned[request_id] = asked.undo
            if len(self._abandoned) > REMEMBERED:
                self._abandoned.popitem(last=False)
        self._end(asked)
        self._tell = True

    def abandon_all(self) -> None:
        for request_id in [*(asked.request_id for asked in self._line), *self._asked]:
            self.abandon(request_id)

    # ------------------------------------------------------------------ the wire

    def receive(self, frames: Sequence[Any], now: float) -> list[Outcome]:
        """A message of the broker. What is no reply, and a second reply, finds nobody waiting."""
        outcomes: list[Outcome] = []
        try:
            for request_id, value, error, payload in envelope.unpack_replies(frames):
                result = ReplyValue(value, payload) if error is None else _raised(*error)
                outcomes += self._replied(request_id, result, now)
        except (WireError, TypeError) as unreadable:
            self._complaint = f"its last message could not be read: {unreadable}"
        return outcomes

    def _replied(self, request_id: int, result: ReplyValue | Exception, now: float) -> list[Outcome]:
        asked = self._asked.get(request_id)
        if asked is None:
            self._unexpected(request_id, result, now)
            return []
        if isinstance(result, RefusedError) and result.reason == "busy":
            asked.resend_at = now + BUSY_S
            self._next_time = min(self._next_time, asked.resend_at)
            return []
        self._end(asked)
        self._give_credit(now)
        return [Outcome(request_id, result, asked.undo)]

    def tick(self, now: float) -> list[Outcome]:
        """What time has brought: deadlines, and what is to be sent again."""
        outcomes = []
        for asked in [*self._asked.values(), *self._line]:
            if asked.deadline <= now:
                self.abandon(asked.request_id)
                outcomes.append(Outcome(asked.request_id, self._late(asked)))
            elif asked.request_id in self._asked and asked.resend_at <= now:
                self._send(asked, now)
        self._give_credit(now)
        self._find_next_time()
        return outcomes

    def reconnected(self, now: float) -> None:
        """Whatever was under way may be lost: send it again."""
        for asked in self._asked.values():
            self._send(asked, now)
        self._find_next_time()

    def outgoing(self) -> list[Message]:
        """The messages that are to be sent now: one, unless it would be too large."""
        due = [asked for number in self._due if (asked := self._asked.get(number)) is not None]
        telling, self._tell = self._tell and self._newest > 0, False
        self._due.clear()
        if not due and not telling:
            return []
        requests = [envelope.WireRequest(a.request_id, a.op, a.packed, a.frames) for a in due]
        return envelope.pack_calls(
            envelope.ClientMessage(self._newest, list(self._asked), self.run, self.name, requests)
        )

    def next_time(self) -> float | None:
        """When `tick` should be asked next: it finds something to do, or a later time."""
        return self._next_time if self._asked or self._line else None

    def first_deadline(self) -> float | None:
        """Of the requests that have no answer; None without any."""
        return min((asked.deadline for asked in [*self._asked.values(), *self._line]), default=None)

    def _find_next_time(self) -> None:
        """Exactly. Elsewhere the time only comes nearer: to look at all of them for every message is too slow."""
        times = [min(asked.resend_at, asked.deadline) for asked in self._asked.values()]
        self._next_time = min([*times, *(asked.deadline for asked in self._line)], default=math.inf)

    # ------------------------------------------------------------------ credit

    def _give_credit(self, now: float) -> None:
        while self._line and len(self._asked) < CREDIT_REQUESTS:
            asked = self._line[0]
            if self._bytes and self._bytes + asked.nbytes > CREDIT_BYTES:
                return
            self._line.popleft()
            self._asked[asked.request_id] = asked
            self._bytes += asked.nbytes
            self._newest = asked.request_id
            self._send(asked, now)

    def _send(self, asked: PendingRequest, now: float) -> None:
        asked.resend_at = now + RESEND_S
        if asked.park_until is not None:  # a broker that is new to it must not begin to wait from the start
            left = max(0.0, asked.park_until - now)
            if left < asked.args["wait_s"]:
                asked.args = {**asked.args, "wait_s": left}
                asked.packed = wire.pack_value(asked.args)
        self._next_time = min(self._next_time, asked.resend_at, asked.deadline)
        if asked.request_id not in self._due:
            self._due.append(asked.request_id)

    def _end(self, asked: PendingRequest) -> None:
        del self._asked[asked.request_id]
        self._bytes -= asked.nbytes
        if not self._asked and not self._line:
            self._next_time = math.inf

    # ------------------------------------------------------------------ messages

    def _unexpected(self, request_id: int, result: ReplyValue | Exception, now: float) -> None:
        """A grant that nobody waits for, a second answer, or a complaint about a message that was not understood."""
        # Kept: a request that was sent twice may be refused as busy and then granted, or granted by two brokers.
        undo = self._abandoned.get(request_id)
        if undo is not None and isinstance(result, ReplyValue):
            self.undo(undo, result.value, now)
        elif request_id == UNKNOWN and isinstance(result, WireError):
            self._complaint = f"it says: {result}"

    def undo(self, undo: Undo, value: Any, now: float) -> None:
        """Give back what was granted. If that is lost too, a lease ends by itself, since nobody renews it."""
        with suppress(KeyError, TypeError, ValueError):
            request = undo(value)
            if request is not None:
                self.ask(*request, (), 0.0, UNDO_S, now)

    def _late(self, asked: PendingRequest) -> DeadlineError:
        who, what = self.name.rsplit("/", 1)[0], f"an answer to '{asked.op}'"
        if self._complaint:
            what += f" ({self._complaint})"
        return DeadlineError(who, f"the queue at {self.address}", what, asked.seconds)


def _checked_size(op: str, packed: bytes, frames: Sequence[wire.Buffer]) -> int:
    """Bytes of the payload. What the broker would not read is a WireError here, and a bug where it is asked."""
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
