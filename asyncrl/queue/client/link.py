"""The wire of a client to the broker: a `Link` may lose messages, but reports when it is connected (again).

`SocketLink` is a ZeroMQ DEALER on an event loop. The loop watches the sockets' descriptors, which signal new messages
only once: at first, after every send and every wake-up all messages must be taken.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import zmq

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.rpc import sockets
from asyncrl.rpc.keys import ClientKeys
from asyncrl.rpc.sockets import HANDSHAKE_FAILED, events_of

BURST = 64
"""Messages taken before other work of the loop gets its turn."""

FAILED_HANDSHAKES = 5
"""This many failed handshakes without a reason, before the first that succeeds, mean that the keys do not fit."""

COPIED = 1 << 17
"""Smaller frames are copied, which is faster than ZeroMQ's notice that one is not needed any more."""

MAX_RECONNECT_MS = 1000
HEARTBEAT_MS = 10_000
"""Interval of the connection's own heartbeats: a peer whose machine is gone is noticed after two."""

GIVEN_UP_S = 1.0
"""After this long without a new attempt libzmq makes none: it gives an address up after bytes that broke ZMTP, be it
one changed length."""

EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | HANDSHAKE_FAILED


class Listener(Protocol):
    """Receives the events of a link, on the event loop."""

    def received(self, frames: Sequence[Any]) -> None: ...

    def connected(self) -> None:
        """Connected for the first time or again: earlier messages may be lost."""

    def disconnected(self) -> None:
        """Until `connected` nothing arrives and nothing leaves. A link that does not connect at once begins with it."""

    def rejected(self, error: AsyncRLError) -> None:
        """The broker rejects this client; nothing more will come."""


class Link(Protocol):
    address: str

    def open(self, listener: Listener) -> None:
        """Connect, on a running event loop. ConfigError for an invalid address."""

    def send(self, frames: Sequence[Any]) -> None:
        """Send without waiting; lost while not connected."""

    def renew(self) -> None:
        """Close the connection and make another, which the listener learns as from any that breaks. Does nothing where
        none can break."""

    def close(self) -> None: ...


class SocketLink:
    """keys: for a broker that requires them; ConfigError (key queue.keys) for the listener if they do not fit."""

    def __init__(self, address: str, keys: ClientKeys | None = None) -> None:
        self.address = address
        self._keys = keys
        self._up = self._was_up = self._scheduled = False
        self._failures = 0
        self._timer: asyncio.TimerHandle | None = None  # runs from a disconnection to the next attempt

    def open(self, listener: Listener) -> None:
        self._listener, self._loop = listener, asyncio.get_running_loop()
        sockets.keep_freed_memory()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)  # the session's credit bounds what is under way
        self._socket.copy_threshold = COPIED
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.IPV6, "[" in self.address)
        if self._keys is not None:
            self._keys.connect_to_broker(self._socket)
        self._monitor = self._socket.get_monitor_socket(EVENTS)
        self._loop.add_reader(self._socket.fileno(), self._take)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self.close()
            remedy = "give it as tcp://HOST:PORT, e.g. queue.address=tcp://127.0.0.1:5555"
            raise ConfigError("queue.address", self.address, f"cannot be used: {error}", remedy) from error
        listener.disconnected()
        self._watch()
        self._soon()

    def send(self, frames: Sequence[Any]) -> None:
        if self._up:
            with suppress(zmq.Again):
                sockets.send(self._socket, frames)
            self._soon()

    def renew(self) -> None:
        self._lost()
        with suppress(zmq.ZMQError):  # there may be none any more
            self._socket.disconnect(self.address)
        self._socket.connect(self.address)

    def close(self) -> None:
        self._stop_timer()
        for socket in (self._socket, self._monitor):
            self._loop.remove_reader(socket.fileno())
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()

    # ------------------------------------------------------------------ descriptors

    def _soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._take)

    def _take(self) -> None:
        self._scheduled = False
        for _ in range(BURST):
            frames = [] if self._socket.closed else sockets.receive(self._socket)
            if not frames:
                return
            self._listener.received(frames)
        self._soon()

    def _watch(self) -> None:
        for event in events_of(self._monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._take()  # replies of the connection before: their requests would be sent again
                self._stop_timer()
                self._up = self._was_up = True
                self._listener.connected()
            elif event == zmq.EVENT_DISCONNECTED:
                self._lost()
                self._timer = self._loop.call_later(GIVEN_UP_S, self.renew)
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self._stop_timer()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and self._was_up:
                # Encrypted bytes were changed on their way: libzmq would go on with this connection, which brings
                # nothing any more, until heartbeats stop.
                self.renew()
            elif self._hopeless(event):
                self._listener.rejected(self._misfit())

    def _lost(self) -> None:
        self._up = False
        self._stop_timer()
        self._listener.disconnected()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hopeless(self, event: int) -> bool:
        """Whether the next handshake would fail too."""
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return True
        self._failures += 1
        # Keys that were right once are right: then the broker is being started again.
        return not self._was_up and self._failures >= FAILED_HANDSHAKES

    def _misfit(self) -> ConfigError:
        given = None if self._keys is None else self._keys.path
        return ConfigError(
            "queue.keys",
            given,
            f"the queue at {self.address} did not accept {'these keys' if given else 'a client without keys'}",
            "set queue.keys to the folder of `asyncrl keys` that the queue was started with, or leave both without",
        )
