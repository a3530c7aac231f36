"""The broker without its socket: which request gets which reply, and when. Pure: messages and times in, messages out.

    message ──▸ receive ──▸ its reply                           handled at once, or sent before
                   │    ──▸ nothing                             over, or waiting already
                   ▾
               parked ◂── behind those that wait for the same
                   │
    time ──────▸ tick: expire leases ──▸ those whose wait key changed ──▸ those whose wait is over ──▸ replies
                                                ▴                                  │
                                                └── one reply may make way ◂───────┘

    parked request        unparked by
    feeder     room       a lease that takes a pending task
    generator  lease      submit, trained (admission moves), give_back or an expired lease, claim (room),
                          a grant to a client that is not connected any more
    stage      lease      commit, or the columns of earlier stages; give_back or an expired lease
    learner    claim      commit, or the last column; trained, or the claim of rank 0, for a rank that is a step ahead
    anyone     lookup     post
    all of them           finish, or their own wait_s

No request waits longer than its wait_s. Payload frames are passed on unread.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from asyncrl.errors import AsyncRLError, RefusedError, WireError
from asyncrl.queue.broker.client_state import ClientState, Grants, UnreadValues
from asyncrl.queue.broker.handlers import LARGE, handle, refusal
from asyncrl.queue.broker.long_poll import LongPoll, Waiter
from asyncrl.queue.broker.queue_state import QueueState, Reply, SessionRequest
from asyncrl.queue.ledger import generator_commands
from asyncrl.queue.protocol.requests import (
    GoodbyeRequest,
    LeaseRequest,
    Request,
    StageLeaseRequest,
    StatusRequest,
    unpack_request,
)
from asyncrl.queue.wire import wire
from asyncrl.queue.wire.envelope import (
    UNKNOWN,
    ClientMessage,
    Message,
    WireRequest,
    pack_replies,
    pack_reply,
    unpack_call,
)

log = logging.getLogger(__name__)

MAX_CLIENTS = 4096
"""Clients that are remembered; the one silent for longest is forgotten first. Live ones send every few seconds."""

SILENT_S = 120.0
"""The broker forgets a client and its unread replies after so long a silence. A client that comes back repeats its
requests as it would to a restarted broker."""

BEHIND_S = 10.0
"""While messages are left unread, no lease expires, for at most so long: a client that floods the broker does not keep
the leases of others standing. The socket reads its clients in turns, so that each has had many by then."""

ENTRY_BYTES = 160
"""Memory of one entry of a list in a request that waits, besides its own bytes."""

HEAD_BYTES = 64
"""More than a message has around a single reply."""

MAX_DETAIL = 500
"""Characters of an error's text."""

REGISTRY = ""
"""The wait key of requests that wait for something other than a stream."""

Handle = Callable[[QueueState, SessionRequest, float, bool], "Reply | None"]


class OutgoingReply(NamedTuple):
    """A reply for one client, as envelope.py packs it. number: of the request."""

    identity: bytes
    reply: Message
    number: int = UNKNOWN

    @property
    def frames(self) -> Message:
        """A message of this reply alone."""
        (message,) = pack_replies([self.reply])
        return message


class Dispatcher:
    """handle: replies to one request, or returns None if it has to wait."""

    def __init__(self, queue: QueueState, handle: Handle = handle) -> None:
        self.queue, self._handle = queue, handle
        self._clients: OrderedDict[bytes, ClientState] = OrderedDict()
        self._values = UnreadValues()
        self._waiting = LongPoll()
        self._tried: dict[str, int] = {}  # wait key -> its changes when its queues were last tried
        self._level_at = math.inf  # when no message was left unread, in the time of leases

    @property
    def parked(self) -> int:
        return len(self._waiting)

    @property
    def unread_bytes(self) -> int:
        """Bytes of the values in all replies that may not have been read."""
        return self._values.nbytes

    @property
    def parked_bytes(self) -> int:
        return self._waiting.nbytes

    def receive(self, identity: bytes, frames: Sequence[Any], now: float) -> list[OutgoingReply]:
        """One message. frames: anything with the buffer protocol and a length."""
        try:
            message = unpack_call(frames)
        except WireError as error:
            return [OutgoingReply(identity, _packed(UNKNOWN, refusal(self.queue, error)))]
        self.queue.clock.advance(now)
        client = self._client(identity, now)
        client.name = message.session.rsplit("/", 1)[0]
        for over in client.update(message.newest, message.waiting):
            self._waiting.remove((identity, over))
        return [
            reply
            for request in message.requests
            for reply in self._receive_request(identity, client, message, request, now)
        ]

    def tick(self, now: float, behind: bool = False) -> list[OutgoingReply]:
        """The replies that time and earlier messages have made possible. To be called after every burst of messages.

        behind: messages are left unread, maybe renewals of leases.
        """
        time = self.queue.clock.advance(now)
        self._level_at = min(self._level_at, time) if behind else time
        if not behind or time - self._level_at > BEHIND_S:
            self.queue.expire(time)
        replies: list[OutgoingReply] = []

        def answer(waiter: Waiter, late: bool = False) -> bool:
            reply = self._reply(waiter.request, now, late)
            if reply is not None:
                replies.append(self._outgoing(*waiter.key, waiter.request, reply))
            return reply is not None

        while sum([self._waiting.offer(key, answer) for key in self._changed_keys()]):
            pass  # one reply may make another request answerable
        for waiter in self._waiting.late(now):
            answer(waiter, late=True)
            self._waiting.remove(waiter.key)
        self._forget_silent(now)
        return replies

    def unreachable(self, identity: bytes, replies: Iterable[OutgoingReply]) -> bool:
        """The client's connection is gone, and these replies could not be sent. Returns whether leases came back.

        The leases in them are given back, and nothing waits for the client any more: it sends its requests again if it
        comes back.
        """
        client, returned = self._clients.get(identity), False
        if client is None:
            return False
        for number in client.waiting:
            self._waiting.remove((identity, number))
        for number in [reply.number for reply in replies if reply.number in client.grants]:
            grants = client.grants[number]
            client.drop(number)
            generator_commands.give_back(
                self.queue.streams[grants.stream].ledger, grants.leases, "unreachable"
            )
            returned = True
        return returned

    # ------------------------------------------------------------------ one request

    def _receive_request(
        self, identity: bytes, client: ClientState, message: ClientMessage, wire: WireRequest, now: float
    ) -> list[OutgoingReply]:
        """A request, for the first time or repeated; it may be over, or wait already."""
        key = identity, wire.number
        if wire.number not in client.waiting or key in self._waiting:
            return []
        if wire.number in client.unread:
            if not client.may_have_again(wire.number, now):
                self.queue.refused["unread"] += 1
                return []
            return [OutgoingReply(identity, client.unread[wire.number], wire.number)]
        if client.busy:
            self.queue.refused["busy"] += 1
            return [OutgoingReply(identity, _packed(wire.number, _BUSY))]
        try:
            request = unpack_request(wire.op, wire.args, wire.frames)
        except (WireError, RefusedError) as error:
            reply = _packed(wire.number, refusal(self.queue, error))
            client.keep(wire.number, reply)
            return [OutgoingReply(identity, reply)]
        incoming = SessionRequest(message.run, message.session, request, tuple(wire.frames))
        return self._reply_or_park(*key, incoming, now, len(wire.args))

    def _reply_or_park(
        self, identity: bytes, number: int, incoming: SessionRequest, now: float, packed: int
    ) -> list[OutgoingReply]:
        """packed: bytes of the request"""
        wait_key = self._wait_key(incoming)
        if not self._waiting.has(wait_key, incoming.request.verb):
            reply = self._reply(incoming, now)
            if reply is not None:
                return [self._outgoing(identity, number, incoming, reply)]
            wait_key = self._wait_key(incoming)  # the first request that names a stream creates it
        else:
            # Nobody overtakes earlier requests, but the next tick must try this one too.
            self._tried.pop(wait_key, None)
        nbytes = packed + ENTRY_BYTES * (incoming.request.entries + 1)
        try:
            self._waiting.add(
                Waiter(identity, number, incoming, wait_key, now + incoming.request.wait_s, nbytes)
            )
        except RefusedError as error:
            return [self._outgoing(identity, number, incoming, refusal(self.queue, error))]
        return []

    def _reply(self, incoming: SessionRequest, now: float, late: bool = False) -> Reply | None:
        """The reply of the handler. A bug that one request uncovers must not take the others' queue away."""
        try:
            reply = self._handle(self.queue, incoming, self.queue.clock.time, late)
        except (AsyncRLError, OSError):
            raise  # the journal cannot be written: no reply may be sent any more
        except Exception as error:
            return self._bug(incoming, error)
        if isinstance(incoming.request, StatusRequest) and reply is not None and reply.error is None:
            seen = {"clients": len(self._clients), "silent_s": self._silent_s(now), "parked": self.parked}
            seen |= {"parked_bytes": self.parked_bytes, "unread_bytes": self.unread_bytes}
            return Reply({**reply.value, **seen})
        return reply

    def _outgoing(
        self, identity: bytes, number: int, incoming: SessionRequest, reply: Reply
    ) -> OutgoingReply:
        try:
            message = _packed(number, reply)
        except (TypeError, ValueError, OverflowError) as error:
            message = _packed(number, self._bug(incoming, error))
        if len(message) > wire.MAX_FRAMES or len(message[0]) > wire.MAX_ENVELOPE_BYTES - HEAD_BYTES:
            message = _packed(number, self._too_large(incoming, message))
        if isinstance(incoming.request, GoodbyeRequest):
            self._forget(identity)
        elif identity in self._clients:
            self._clients[identity].keep(number, message, _grants(incoming.request, reply))
        return OutgoingReply(identity, message, number)

    def _too_large(self, incoming: SessionRequest, message: Message) -> Reply:
        """An error that the client can read, in place of a reply that it would not."""
        what = f"the reply to '{incoming.request.verb}'"
        detail = (
            f"{what} has {len(message[0])} bytes and {len(message) - 1} frames, more than a message may have"
        )
        return refusal(self.queue, RefusedError(LARGE, detail))

    def _bug(self, incoming: SessionRequest, error: Exception) -> Reply:
        log.error("request '%s' of %s", incoming.request.verb, incoming.session, exc_info=error)
        self.queue.refused["bug"] += 1
        return Reply(error=("refused", "bug", f"{type(error).__name__}: {error}"))

    # ------------------------------------------------------------------ wait keys

    def _wait_key(self, incoming: SessionRequest) -> str:
        stream = getattr(incoming.request, "stream", REGISTRY)
        return stream if stream in self.queue.streams else REGISTRY

    def _changed_keys(self) -> list[str]:
        """The wait keys that have changed since their queues were last tried, which happens next."""
        changes = {
            key: self.queue.posts if key == REGISTRY else self.queue.streams[key].changes
            for key in self._waiting.keys
        }
        changed = [key for key, count in changes.items() if self._tried.get(key) != count]
        self._tried.update(changes)
        return changed

    # ------------------------------------------------------------------ clients

    def _client(self, identity: bytes, now: float) -> ClientState:
        client = self._clients.get(identity)
        if client is None:
            client = self._clients[identity] = ClientState(values=self._values)
        client.seen_at = now
        self._clients.move_to_end(identity)
        if len(self._clients) > MAX_CLIENTS:
            self._forget(next(iter(self._clients)))
        return client

    def _silent_s(self, now: float) -> dict[str, float]:
        """By name of a client, the seconds since its last message. A client that has sent goodbye has no entry."""
        return {client.name: now - client.seen_at for client in self._clients.values()}  # newest last

    def _forget_silent(self, now: float) -> None:
        while self._clients:
            identity, client = next(iter(self._clients.items()))
            if client.seen_at + SILENT_S >= now:
                return
            self._forget(identity)

    def _forget(self, identity: bytes) -> None:
        client = self._clients.pop(identity, None)
        if client is None:
            return
        for number in client.waiting:
            self._waiting.remove((identity, number))
        client.drop_all()


def _grants(request: Request, reply: Reply) -> Grants | None:
    """The leases in a reply, which is a list of [ordinal, epoch, …]."""
    if isinstance(request, LeaseRequest | StageLeaseRequest) and reply.value:
        return Grants(request.stream, [(ordinal, epoch) for ordinal, epoch, *_ in reply.value])
    return None


def _packed(number: int, reply: Reply) -> Message:
    error = reply.error and [part[:MAX_DETAIL] for part in reply.error]
    return pack_reply(number, reply.value, error, reply.frames)


_BUSY = Reply(
    error=("refused", "busy", "too many requests or unread replies of this client; it must read first")
)
