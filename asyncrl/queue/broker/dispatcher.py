"""The broker without its socket: who is answered what, and when. Pure: messages and times in, messages out.

    message ──▸ receive ──▸ its reply                           answered at once, or answered before
                   │    ──▸ nothing                             over, or waiting already
                   ▾
               parked ◂── behind those that wait for the same
                   │
    time ──────▸ tick: expire leases ──▸ those whose subject moved ──▸ those whose wait is over ──▸ replies
                                                ▴                                  │
                                                └── one answer may make way ◂──────┘

    parked request        unparked by
    feeder     room       a lease that takes a pending task
    generator  lease      submit, trained (admission moves), give_back or an expired lease, claim (room)
    stage      lease      commit, or what the stages before it add; give_back or an expired lease
    learner    claim      commit, or the last column;  trained, for a rank that is a step ahead
    anyone     lookup     post
    all of them           finish, or their own wait_s

Nobody waits longer than the wait_s it asked for. Payload frames are passed on, never looked into.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncrl.errors import AsyncRLError, WireError
from asyncrl.queue.broker.long_poll import LongPoll, Waiter
from asyncrl.queue.broker.service import QueueService, Reply, Request
from asyncrl.queue.wire import wire
from asyncrl.queue.wire.client_state import UNKNOWN, ClientState, Message
from asyncrl.queue.wire.envelope import ClientMessage, WireRequest, pack_replies, pack_reply, unpack_call

log = logging.getLogger(__name__)

MAX_CALLERS = 4096
"""Clients that are remembered; the one silent for longest is forgotten first. Live ones are heard every few seconds."""

SILENT_S = 120.0
"""A client that is silent for longer is forgotten, with the replies that it has not read: it has gone, waits for
nothing, or is cut off, and then asks again as it would ask a new broker."""

MAX_DETAIL = 500
"""Characters of an error's text."""

DIRECTORY = ""
"""The subject of requests that wait for something other than a stream."""


class OutgoingReply(NamedTuple):
    """A reply for one client, as envelope.py packs it."""

    identity: bytes
    reply: Message

    @property
    def frames(self) -> Message:
        """A message of this reply alone."""
        (message,) = pack_replies([self.reply])
        return message


class Dispatcher:
    def __init__(self, service: QueueService) -> None:
        self.service = service
        self._callers: OrderedDict[bytes, ClientState] = OrderedDict()
        self._parking = LongPoll()
        self._tried: dict[str, int] = {}  # subject -> its moves when its lines were last tried

    @property
    def parked(self) -> int:
        return len(self._parking)

    def receive(self, identity: bytes, frames: Sequence[Any], now: float) -> list[OutgoingReply]:
        """One message. frames: anything with the buffer protocol and a length."""
        try:
            call = unpack_call(frames)
        except WireError as error:
            return [OutgoingReply(identity, _packed(UNKNOWN, self._malformed(error)))]
        caller = self._caller(identity, now)
        caller.name = call.session.rsplit("/", 1)[0]
        for over in caller.hear(call.newest, call.waiting):
            self._parking.remove((identity, over))
        return [
            letter for asked in call.requests for letter in self._heard(identity, caller, call, asked, now)
        ]

    def tick(self, now: float) -> list[OutgoingReply]:
        """What time and the messages before have brought about. To be called after every burst of messages."""
        self.service.expire(now)
        letters: list[OutgoingReply] = []

        def answer(waiter: Waiter, late: bool = False) -> bool:
            reply = self._answer(waiter.request, now, late)
            if reply is not None:
                letters.append(self._reply(*waiter.key, waiter.request, reply))
            return reply is not None

        while sum([self._parking.offer(subject, answer) for subject in self._moved()]):
            pass  # one answer may make way for another
        for waiter in self._parking.late(now):
            answer(waiter, late=True)
            self._parking.remove(waiter.key)
        self._forget_silent(now)
        return letters

    # ------------------------------------------------------------------ one request

    def _heard(
        self, identity: bytes, caller: ClientState, call: ClientMessage, asked: WireRequest, now: float
    ) -> list[OutgoingReply]:
        """For the first time or again; it may be over, or wait already."""
        key = identity, asked.number
        if asked.number not in caller.waiting or key in self._parking:
            return []
        if asked.number in caller.unread:
            return [OutgoingReply(identity, caller.unread[asked.number])]
        if caller.busy:
            self.service.refused["busy"] += 1
            return [OutgoingReply(identity, _packed(asked.number, _BUSY))]
        try:
            request = Request(asked.op, call.run, call.session, _arguments(asked), tuple(asked.frames))
        except WireError as error:
            reply = _packed(asked.number, self._malformed(error))
            caller.keep(asked.number, reply)
            return [OutgoingReply(identity, reply)]
        return self._answer_or_park(*key, request, now)

    def _answer_or_park(
        self, identity: bytes, request_id: int, request: Request, now: float
    ) -> list[OutgoingReply]:
        try:
            until = now + request.wait_s
        except WireError as error:
            return [self._reply(identity, request_id, request, self._malformed(error))]
        subject = self._subject(request)
        if not self._parking.somebody_asks(subject, request.op):
            reply = self._answer(request, now)
            if reply is not None:
                return [self._reply(identity, request_id, request, reply)]
            subject = self._subject(request)  # a stream comes to be when it is first asked for
        else:
            # Nobody overtakes those who came first, but the next tick must try this one too.
            self._tried.pop(subject, None)
        self._parking.add(Waiter(identity, request_id, request, subject, until))
        return []

    def _answer(self, request: Request, now: float, late: bool = False) -> Reply | None:
        """The service's answer. A bug that one request uncovers must not take the others' queue away."""
        try:
            reply = self.service.answer(request, now, late)
        except (AsyncRLError, OSError):
            raise  # the journal cannot be written: nothing may be answered any more
        except Exception as error:
            return self._bug(request, error)
        if reply is not None and request.op == "status" and reply.error is None:
            seen = {"clients": len(self._callers), "silent_s": self._silent_s(now), "parked": self.parked}
            return Reply({**reply.value, **seen})
        return reply

    def _reply(self, identity: bytes, request_id: int, request: Request, reply: Reply) -> OutgoingReply:
        try:
            message = _packed(request_id, reply)
        except (TypeError, ValueError, OverflowError) as error:
            message = _packed(request_id, self._bug(request, error))
        if request.op == "goodbye":
            self._forget(identity)
        elif identity in self._callers:
            self._callers[identity].keep(request_id, message)
        return OutgoingReply(identity, message)

    def _malformed(self, error: WireError) -> Reply:
        self.service.refused["malformed"] += 1
        return Reply(error=("wire", "", str(error)))

    def _bug(self, request: Request, error: Exception) -> Reply:
        log.error("request '%s' of %s", request.op, request.session, exc_info=error)
        self.service.refused["bug"] += 1
        return Reply(error=("refused", "bug", f"{type(error).__name__}: {error}"))

    # ------------------------------------------------------------------ subjects

    def _subject(self, request: Request) -> str:
        stream = request.args.get("stream")
        return stream if isinstance(stream, str) and stream in self.service.streams else DIRECTORY

    def _moved(self) -> list[str]:
        """The subjects whose lines may have become answerable since they were tried, which they are next."""
        moves = {
            subject: self.service.posts if subject == DIRECTORY else self.service.streams[subject].changes
            for subject in self._parking.subjects
        }
        moved = [subject for subject, count in moves.items() if self._tried.get(subject) != count]
        self._tried.update(moves)
        return moved

    # ------------------------------------------------------------------ callers

    def _caller(self, identity: bytes, now: float) -> ClientState:
        caller = self._callers.setdefault(identity, ClientState())
        caller.heard_at = now
        self._callers.move_to_end(identity)
        if len(self._callers) > MAX_CALLERS:
            self._forget(next(iter(self._callers)))
        return caller

    def _silent_s(self, now: float) -> dict[str, float]:
        """By name of a client, the seconds since its last message. A client that has said goodbye has no entry."""
        return {caller.name: now - caller.heard_at for caller in self._callers.values()}  # newest last

    def _forget_silent(self, now: float) -> None:
        while self._callers:
            identity, caller = next(iter(self._callers.items()))
            if caller.heard_at + SILENT_S >= now:
                return
            self._forget(identity)

    def _forget(self, identity: bytes) -> None:
        caller = self._callers.pop(identity, None)
        for request_id in caller.waiting if caller else ():
            self._parking.remove((identity, request_id))


def _arguments(asked: WireRequest) -> dict[str, Any]:
    args = wire.unpack_value(asked.args)
    if not isinstance(args, dict):
        raise WireError(f"'{asked.op:.64}': arguments must be a map, not {type(args).__name__}")
    return args


def _packed(number: int, reply: Reply) -> Message:
    error = reply.error and [part[:MAX_DETAIL] for part in reply.error]
    return pack_reply(number, reply.value, error, reply.frames)


_BUSY = Reply(
    error=("refused", "busy", "too many requests or unread replies of this client; it must read first")
)
