"""The client of an RpcServer: requests leave in their order, each is a future of its reply.

any thread ── request ─▸ outbox ── wake-up ──▸ the client's thread ── DEALER ─▸ RpcServer
           ◂─ future ────────────────────────────────┘     ▲── the connection is cut: all futures fail, for good
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import zmq

from asyncrl.errors import AsyncRLError, DeadlineError, RefusedError, WireError
from asyncrl.rpc.keys import ClientKeys
from asyncrl.rpc.message import MAX_BYTES, OK, UNREADABLE, Fields, decode, encode
from asyncrl.rpc.sockets import HANDSHAKE_FAILED, Wakeup, events_of

HEARTBEAT_MS, SILENCE_MS = 2_000, 10_000
"""Between two heartbeats of a connection; after this long without one from the server it counts as cut."""

LINGER_MS = 1_000
"""How long requests that have not left yet outlive `close`, which does not wait for them."""

ENDED = "it has ended"
OTHER_KEYS = (
    "it broke off the handshake: it has ended, or it has other keys; set queue.keys to the same folder on both "
    "sides, or to none"
)

RpcReply = Future[Fields]


class RpcClient:
    """A connection to one server, from any number of threads.

    Args:
        who: this side, for errors, e.g. 'learner rank 0'
        whom: the server, for errors, e.g. 'the pool of the critic'
        lost: makes the error of a connection that is cut of its message
    """

    def __init__(
        self,
        endpoint: str,
        who: str,
        whom: str,
        lost: Callable[[str], AsyncRLError],
        keys: ClientKeys | None = None,
    ) -> None:
        self.endpoint, self.who, self.whom = endpoint, who, f"{whom} at {endpoint}"
        self._error = lost
        self._numbers = itertools.count(1)
        self._waiting: dict[int, RpcReply] = {}
        self._outbox: deque[bytes] = deque()
        self._lost = ""  # why, once the connection is cut
        self._lock = threading.Lock()  # guards the four above
        self._dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._dealer.set_hwm(0)  # callers bound what is under way
        self._dealer.setsockopt(zmq.LINGER, LINGER_MS)
        self._dealer.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        # A server that dies cuts the connection at once; one whose machine is gone, when heartbeats stop.
        self._dealer.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        if keys is not None:
            keys.connect(self._dealer)
        self._cut: zmq.Socket[bytes] = self._dealer.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
        )
        self._wakeup = Wakeup()
        self._dealer.setsockopt(zmq.IPV6, "[" in endpoint)
        self._dealer.connect(endpoint)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"RPC client of {whom}", daemon=True)
        self._thread.start()

    def request(self, kind: str, fields: Mapping[str, Any]) -> RpcReply:
        """Send a request without waiting. The future fails with RefusedError, or once the connection is cut."""
        reply: RpcReply = Future()
        with self._lock:
            if self._lost:
                reply.set_exception(self._error(f"{self.who} has lost {self.whom}: {self._lost}"))
                return reply
            number = next(self._numbers)
            self._waiting[number] = reply
            self._outbox.append(encode(number, kind, fields))
        reply.add_done_callback(lambda _: self._waiting.pop(number, None))
        self._wakeup.set()
        return reply

    def wait(self, reply: RpcReply, what: str, seconds: float) -> Fields:
        """The reply to a request. One that comes after the deadline is ignored.

        what: the caller waits for, e.g. 'the gradient norm of version 7'

        Raises:
            DeadlineError: no reply came
            RefusedError: the server refused the request
            AsyncRLError: the connection was cut; the class is the client's
        """
        try:
            return reply.result(max(0.0, seconds))
        except TimeoutError:
            reply.cancel()
            raise DeadlineError(self.who, self.whom, what, seconds) from None
        except RefusedError:
            raise
        except AsyncRLError as lost:
            raise self._error(f"{lost}; it was to give {what}") from None

    def call(self, kind: str, fields: Mapping[str, Any], what: str, seconds: float) -> Fields:
        """`request` and `wait`."""
        return self.wait(self.request(kind, fields), what, seconds)

    def check(self) -> None:
        """Raise the error of a connection that is cut, if it is."""
        if self._lost:
            raise self._error(f"{self.who} has lost {self.whom}: {self._lost}")

    def close(self) -> None:
        """Futures that have no reply yet fail. Idempotent."""
        self._closing = True
        self._wakeup.set()
        self._thread.join()
        self._wakeup.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for readable in (self._dealer, self._wakeup, self._cut):
            poller.register(readable, zmq.POLLIN)
        while not self._closing and not self._lost:
            ready = dict(poller.poll())
            if self._wakeup.fileno() in ready:
                self._wakeup.clear()
                self._send_queued()
            if self._dealer in ready:
                self._receive(self._dealer.recv())
            elif self._cut in ready:
                self._give_up(
                    OTHER_KEYS if any(e & HANDSHAKE_FAILED for e in events_of(self._cut)) else ENDED
                )
        self._send_queued()
        self._give_up("the connection was closed here")
        self._dealer.disable_monitor()
        self._cut.close()
        self._dealer.close()

    def _send_queued(self) -> None:
        with self._lock:
            messages, self._outbox = self._outbox, deque()
        try:
            for message in messages:
                self._dealer.send(message, zmq.NOBLOCK)
        except zmq.Again:  # there is no connection any more, and `_cut` has the reason
            return

    def _receive(self, message: bytes) -> None:
        try:
            number, verdict, fields = decode(message)
        except WireError as error:
            self._give_up(f"its reply cannot be read: {error}")
            return
        if number == UNREADABLE:  # which request it was, neither side knows
            self._give_up(f"a request arrived there unreadable: {fields.get('detail', '')}")
            return
        with self._lock:
            reply = self._waiting.pop(number, None)
        if reply is None or not reply.set_running_or_notify_cancel():
            return
        if verdict == OK:
            reply.set_result(fields)
        else:
            reason, detail = fields.get("reason", "failed"), fields.get("detail", "")
            reply.set_exception(RefusedError(str(reason), f"{self.whom}: {detail}"))

    def _give_up(self, why: str) -> None:
        with self._lock:
            self._lost = self._lost or why
            waiting, self._waiting = self._waiting, {}
        for reply in waiting.values():
            if reply.set_running_or_notify_cancel():
                reply.set_exception(self._error(f"{self.who} has lost {self.whom}: {self._lost}"))
