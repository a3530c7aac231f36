"""The server of requests. Weight publishers, relays and pools that train a model each run one.

      RpcClient (DEALER)                              RpcServer (ROUTER, one thread)
      request ──[version, number, kind, fields]──▸  handle(request) ─┬─ fields: the reply
      future ◂──[version, number, "ok"|"error", fields]──────────────┼─ park(): tried again at each wake-up
                                                                     └─ None: another thread calls reply() later

Other threads reach the server's thread through `reply`, `refuse` and `wake` alone. No message ends that thread: one
that cannot be read is counted and gets an error as its reply. With keys, only peers that hold the same ones are
admitted (CURVE, http://curvezmq.org).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import zmq

from asyncrl.config.addresses import is_loopback
from asyncrl.config.rules import require
from asyncrl.errors import ConfigError, RefusedError, WireError
from asyncrl.rpc.keys import ClientKeys
from asyncrl.rpc.message import ERROR, MAX_BYTES, OK, UNREADABLE, Fields, decode, encode
from asyncrl.rpc.ports import ANY, first_free, in_url, numeric
from asyncrl.rpc.sockets import HandshakeGuard, Wakeup, allow_open_files

LONGEST_WAIT_S = 3600.0
"""Longest time that a request may be parked."""

LONGEST_DETAIL = 1024
"""Characters of an error: it may quote the request."""

LARGE_BYTES, MOST_LARGE = 1 << 16, 4
"""Size of a large reply, and how many of them a peer may leave unread; a further one is refused as `busy`."""

UNREAD_MS = 60_000
"""After this long a connection that takes no bytes is cut."""

LINGER_MS = 500
"""How long `close` waits for replies that have not left yet."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RpcRequest:
    """A request, and the peer that its reply goes to."""

    peer: bytes
    number: int
    kind: str
    fields: Fields


@dataclass(frozen=True, slots=True)
class _Parked:
    request: RpcRequest
    retry: Callable[[], Fields | None]
    deadline: float
    otherwise: Fields


class RpcServer:
    """Replies to requests in a thread of its own until `close`.

    `malformed` counts messages that could not be read, `refused` peers without the right keys.

    An error of `handle` becomes the reply: RefusedError with its reason, WireError (and a missing or mistyped field) as
    "malformed", any other as "failed". Without keys it listens on loopback only: ConfigError for another host.

    Args:
        host: address of this machine at which peers reach it
        handle: returns the reply to a request, or None; must not block
        on_wake: called after each `wake`; must not block
        ports: that it may listen at. ConfigError (key sync.ports) if none of them is free
    """

    def __init__(
        self,
        host: str,
        name: str,
        handle: Callable[[RpcRequest], Fields | None],
        keys: ClientKeys | None = None,
        on_wake: Callable[[], None] = lambda: None,
        ports: range = ANY,
    ) -> None:
        address = numeric(host)
        rule = f"{name} would listen at {host}, which other machines can reach"
        remedy = "make keys with `asyncrl keys DIR`, and set queue.keys=DIR"
        require(keys is not None or is_loopback(address), "queue.keys", None, rule, remedy)
        allow_open_files()
        self.malformed = self.refused = 0
        self._handle, self._on_wake = handle, on_wake
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, LINGER_MS)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._router.setsockopt(zmq.TCP_MAXRT, UNREAD_MS)
        self._guard = HandshakeGuard(self._router, keys)
        self._router.setsockopt(zmq.IPV6, ":" in address)
        self.endpoint = f"tcp://{in_url(host)}:{self._bound(address, ports, name)}"
        self._wakeup = Wakeup()
        self._closing = False
        self._outbox: deque[tuple[RpcRequest, str, Fields]] = deque()
        self._unread: dict[bytes, list[zmq.MessageTracker]] = {}  # large replies by peer
        self._parked: dict[bytes, _Parked] = {}  # by peer
        self._thread = threading.Thread(target=self._run, name=f"RPC server, {name}", daemon=True)
        self._thread.start()

    def reply(self, request: RpcRequest, fields: Fields) -> None:
        """Reply to a request that `handle` returned None for. From any thread."""
        self._outbox.append((request, OK, fields))
        self.wake()

    def refuse(self, request: RpcRequest, reason: str, detail: str) -> None:
        """Reply with an error to a request that `handle` returned None for. From any thread."""
        self._outbox.append((request, ERROR, {"reason": reason, "detail": detail}))
        self.wake()

    def park(
        self, request: RpcRequest, retry: Callable[[], Fields | None], wait_s: float, otherwise: Fields
    ) -> None:
        """Postpone the reply to a request, in `handle`. An earlier parked request of the same peer is dropped.

        `retry` is called after each `wake` and returns the reply once there is one. After `wait_s` seconds `otherwise`
        is the reply.
        """
        if not 0 <= wait_s <= LONGEST_WAIT_S:
            raise ValueError(f"a wait of {wait_s} s is not within 0 and {LONGEST_WAIT_S}")
        kept = replace(request, fields={})  # they may be large, and its peer may be gone
        self._parked[request.peer] = _Parked(kept, retry, time.monotonic() + wait_s, otherwise)

    def wake(self) -> None:
        """Try parked requests again. From any thread."""
        self._wakeup.set()

    def close(self) -> None:
        """Idempotent."""
        self._closing = True
        self.wake()
        self._thread.join()
        self._wakeup.close()
        self._context.term()

    def _bound(self, address: str, ports: range, name: str) -> int:
        def bind(port: int) -> int:
            self._router.bind(f"tcp://{in_url(address)}:{port or '*'}")
            return int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

        try:
            return first_free(ports, bind)
        except OSError as error:
            self._guard.close()
            self._router.close()
            self._context.term()
            rule = f"{name} cannot listen at {address}: {error.strerror}"
            raise ConfigError(
                "sync.ports", f"{ports[0]}-{ports[-1]}", rule, "name more ports, or none"
            ) from error

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        self._guard.register(poller)
        while not self._closing:
            ready = dict(poller.poll(self._until_next_deadline_ms()))
            if self._wakeup.fileno() in ready:
                self._wakeup.clear()
                self._on_wake()
            self.refused += self._guard.handle(ready)
            if self._router in ready:
                self._receive(self._router.recv_multipart())
            self._retry_parked()
            while self._outbox:
                request, verdict, fields = self._outbox.popleft()
                self._send(request, encode(request.number, verdict, fields))
        self._guard.close()
        self._router.close()

    def _send(self, request: RpcRequest, reply: bytes) -> None:
        if len(reply) <= LARGE_BYTES:
            self._router.send_multipart([request.peer, reply])
            return
        waiting = {peer: [one for one in sent if not one.done] for peer, sent in self._unread.items()}
        self._unread = {peer: sent for peer, sent in waiting.items() if sent}
        sent = self._unread.setdefault(request.peer, [])
        if len(sent) >= MOST_LARGE:
            self._fail(request, "busy", "it has left large replies unread")
            return
        self._router.send(request.peer, zmq.SNDMORE)
        sent.append(self._router.send(reply, copy=False, track=True))

    def _until_next_deadline_ms(self) -> int | None:
        if not self._parked:
            return None
        seconds = min(parked.deadline for parked in self._parked.values()) - time.monotonic()
        # Rounded up: a poll that ends just before the deadline would spin.
        return max(0, math.ceil(seconds * 1000))

    def _receive(self, frames: list[bytes]) -> None:
        peer = frames[0]
        try:
            request = RpcRequest(peer, *decode(b"".join(frames[1:])))
        except WireError as error:
            self._fail(RpcRequest(peer, UNREADABLE, "", {}), "malformed", str(error))
            return
        fields = self._result_of(request, lambda: self._handle(request))
        if fields is not None:
            self._outbox.append((request, OK, fields))

    def _result_of(self, request: RpcRequest, work: Callable[[], Fields | None]) -> Fields | None:
        """The fields of the reply; None if there is none yet, or if the reply is an error."""
        try:
            return work()
        except RefusedError as error:
            self._fail(request, error.reason, error.detail)
        except (WireError, KeyError, TypeError, ValueError, OverflowError) as error:
            self._fail(request, "malformed", repr(error))
        except Exception as error:  # the thread serves all peers: one request must not end it
            log.exception("RPC: request %r failed", request.kind)
            self._fail(request, "failed", repr(error))
        return None

    def _fail(self, request: RpcRequest, reason: str, detail: str) -> None:
        self.malformed += reason == "malformed"
        self._parked.pop(request.peer, None)
        self._outbox.append((request, ERROR, {"reason": reason, "detail": detail[:LONGEST_DETAIL]}))

    def _retry_parked(self) -> None:
        for peer, parked in list(self._parked.items()):
            fields = self._result_of(parked.request, parked.retry)
            if fields is None and time.monotonic() >= parked.deadline:
                fields = parked.otherwise
            if fields is not None and self._parked.pop(peer, None) is not None:
                self._outbox.append((parked.request, OK, fields))
