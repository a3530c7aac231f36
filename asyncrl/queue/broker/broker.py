"""The broker: one ROUTER socket, one thread, one loop. Everybody connects to it; it connects to nobody.

        ┌────────────────────────────────── serve() ───────────────────────────────────┐
        │  poll ─▸ take the messages ─▸ dispatcher: receive … tick ─▸ before_send ─┐   │
        │   ▴                                                                      ▾   │
        │   └────────────────────────── send the replies ◂─────────────────────────┘   │
        └──────────────────────────────────────────────────────────────────────────────┘

dispatcher.py decides which request gets which reply; here are the sockets. A peer that does not read is sent no more
than `UNREAD` messages, and one that sends faster than it is served is not read: neither can make the broker grow.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from asyncrl.errors import ConfigError
from asyncrl.queue.broker.dispatcher import Dispatcher, OutgoingReply
from asyncrl.queue.broker.queue_state import QueueState
from asyncrl.queue.wire import wire
from asyncrl.queue.wire.envelope import MAX_REQUESTS, pack_replies
from asyncrl.rpc import sockets
from asyncrl.rpc.keys import ServerKeys
from asyncrl.rpc.sockets import HandshakeGuard, Wakeup

TICK_S = 0.1
"""Longest pause between two looks at deadlines."""

BURST = 256
"""Messages taken between two looks at the parked requests."""

UNREAD = 2 * MAX_REQUESTS
"""Messages in each direction that wait for one peer."""

UNREAD_MS = 60_000
"""A connection whose peer takes no bytes for so long is cut, and what waits for it is freed. The peer connects again,
and repeats its requests. Linux looks at a full connection 200 ms after the peer's last segment, so a peer that sends
more often, and reads nothing, keeps up to UNREAD messages here."""

HANDOVER_S = 5e-4
"""How long another thread of the process keeps the interpreter when the loop wants it back, which it gives away with
every call of ZeroMQ: Python's own 5 ms are as long as a busy feeder's tasks take."""

BACKLOG = 1024
HEARTBEAT_MS = 10_000


class Broker:
    """Binds at once; `serve` runs the loop until `stop`, which any thread or signal handler may call.

    ConfigError if the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        run: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        keys: ServerKeys | None = None,
    ) -> None:
        self.take_up(QueueState(run), lambda: None)
        self._clock = clock
        sockets.allow_open_files()
        sockets.keep_freed_memory()
        sys.setswitchinterval(HANDOVER_S)
        self._context = zmq.Context()
        self._socket = self._router()
        self._guard = HandshakeGuard(self._socket, keys)
        self.bound_address = self._bind(address)
        self._wakeup = Wakeup()

    def take_up(self, queue: QueueState, before_send: Callable[[], None]) -> None:
        """Go on with this queue instead of an empty one. Before `serve`.

        before_send: called with a burst of messages decided and none of the replies sent; what it raises ends `serve`.
        """
        self.queue, self.dispatcher, self._before_send = queue, Dispatcher(queue), before_send

    def stop(self) -> None:
        """End `serve` soon. Again, or afterwards: nothing."""
        self._wakeup.set()

    def close(self) -> None:
        """Free the address, if `serve` has not done it."""
        self._close_sockets()
        self._wakeup.close()

    def serve(self) -> None:
        """Answer until stopped, then close the socket."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        self._guard.register(poller)
        try:
            while True:
                ready = dict(poller.poll(int(TICK_S * 1000)))
                if self._wakeup.fileno() in ready:
                    return
                if failed := self._guard.handle(ready):
                    self.queue.refused["handshake"] += failed
                replies, behind = self._take() if self._socket in ready else ([], False)
                # First those who waited: what was answered at once is mostly a receipt.
                replies = self.dispatcher.tick(self._clock(), behind) + replies
                self._before_send()
                while self._send(replies):
                    # Leases of clients that are gone came back: who else waits for them?
                    replies = self.dispatcher.tick(self._clock(), behind)
                    self._before_send()
        finally:
            self.close()

    # ------------------------------------------------------------------ the loop's steps

    def _take(self) -> tuple[list[OutgoingReply], bool]:
        """A burst of messages. Returns the replies, and whether messages may be left."""
        replies: list[OutgoingReply] = []
        for _ in range(BURST):
            message = sockets.receive(self._socket)
            if not message:
                return replies, False
            identity, *frames = message
            replies += self.dispatcher.receive(identity.bytes, frames, self._clock())
        return replies, True

    def _send(self, outgoing: Sequence[OutgoingReply]) -> bool:
        """Returns whether leases came back, of clients that are gone."""
        by_client: dict[bytes, list[OutgoingReply]] = {}
        for each in outgoing:
            by_client.setdefault(each.identity, []).append(each)
        returned = False
        for identity, replies in by_client.items():
            messages = pack_replies([each.reply for each in replies])
            if not all(self._send_to(identity, message) for message in messages):
                returned |= self.dispatcher.unreachable(identity, replies)
        return returned

    def _send_to(self, identity: bytes, message: Sequence[Any]) -> bool:
        """Returns False if the client is not connected. A message to one that does not read is lost; it sends its
        request again."""
        try:
            sockets.send(self._socket, [identity, *message])
        except zmq.Again:
            self.queue.refused["unread"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    # ------------------------------------------------------------------ sockets

    def _router(self) -> zmq.Socket:
        router = self._context.socket(zmq.ROUTER)
        router.set_hwm(UNREAD)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full or lost peer is an error, not a silent drop
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        router.setsockopt(zmq.LINGER, 1000)
        router.setsockopt(zmq.BACKLOG, BACKLOG)
        router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        router.setsockopt(zmq.TCP_MAXRT, UNREAD_MS)
        return router

    def _bind(self, address: str) -> str:
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._close_sockets()
            taken = error.errno == zmq.EADDRINUSE
            rule = "another process uses this address" if taken else f"cannot be bound: {error}"
            remedy = "stop that process, choose another port, or set queue.address=tcp://127.0.0.1:*"
            raise ConfigError("queue.address", address, rule, remedy) from error
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _close_sockets(self) -> None:
        self._guard.close()
        self._socket.close()
        self._context.term()
