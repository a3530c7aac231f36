"""Control messages of the weight stream: requests and answers between a subscriber and a publisher. A learner and the
pools that train with it speak the same way.

      ControlClient (DEALER)                          ControlServer (ROUTER, one thread)
      request ──[version, id, kind, fields]──▸  handle(request) ─┬─ fields: answered at once
      waits, with a deadline                                     ├─ park(): tried again at each wake-up
      answer ◂──[version, id, "ok"|"error", fields]──────────────┴─ None: somebody calls answer() later

Other threads reach the server's thread through `answer` and `wake` alone. Nothing that arrives ends it: a message that
cannot be read is counted and answered with an error. msgpack on the wire, never pickle. With keys, only peers that hold
the same ones get to ask (CURVE, http://curvezmq.org).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack
import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncrl.errors import DeadlineError, RefusedError, WeightSyncError, WireError

PROTOCOL = 2
MAX_BYTES = 256 << 20
"""Of one message; a layout or a plan of a large model is a few megabytes."""

HEARTBEAT_S, SILENCE_S = 2.0, 10.0
"""Between two heartbeats of a line; after this long without an answer to them it counts as cut."""

LONGEST_WAIT_S = 3600.0
"""That a request may ask to be parked for."""

ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a peer's key may come in (ZAP, https://rfc.zeromq.org/spec/27)."""

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

log = logging.getLogger(__name__)

Fields = dict[str, Any]


class SocketKeys(Protocol):
    """What makes both ends of a control line prove that they belong to the run; both have the same."""

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is bound."""

    def connect(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is connected."""

    def admit(self, zap_request: Sequence[bytes]) -> list[bytes]:
        """libzmq's question about a peer, answered."""


def encode(number: int, kind: str, fields: Mapping[str, Any]) -> bytes:
    return msgpack.packb([PROTOCOL, number, kind, fields])


def decode(frame: bytes) -> tuple[int, str, Fields]:
    """(number, kind, fields); WireError for anything that `encode` does not write."""
    try:
        protocol, number, kind, fields = msgpack.unpackb(frame)
    except Exception as error:
        raise WireError(f"not a control message: {error!r}") from error
    if protocol != PROTOCOL:
        raise WireError(f"control protocol {protocol!r}, this side speaks {PROTOCOL}")
    if not (isinstance(number, int) and isinstance(kind, str) and isinstance(fields, dict)):
        raise WireError("not a control message: wrong types")
    return number, kind, fields


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """One request, and where its answer goes."""

    peer: bytes
    number: int
    kind: str
    fields: Fields


@dataclass(frozen=True, slots=True)
class _Parked:
    request: ControlRequest
    retry: Callable[[], Fields | None]
    deadline: float
    otherwise: Fields


class ControlServer:
    """Answers requests in a thread of its own until `close`.

    `malformed` counts what could not be read, `refused` the peers without the right keys.

    `handle`, and `on_wake` after each `wake`, run in that thread and must not block. What `handle` raises becomes the
    answer: RefusedError by its reason, WireError (and a missing or mistyped field) as "malformed", anything else as
    "failed".
    """

    def __init__(
        self,
        host: str,
        name: str,
        handle: Callable[[ControlRequest], Fields | None],
        keys: SocketKeys | None = None,
        on_wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.malformed = self.refused = 0
        self._handle, self._keys, self._on_wake = handle, keys, on_wake
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 500)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._zap = self._context.socket(zmq.REP)
        if keys is not None:
            self._zap.bind(ZAP_ADDRESS)
            keys.serve(self._router)
        self._failures = self._router.get_monitor_socket(HANDSHAKE_FAILED)
        port = self._router.bind_to_random_port(f"tcp://{socket.gethostbyname(host)}")
        self.endpoint = f"tcp://{host}:{port}"
        self._bell, self._ringer = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._bell.bind("inproc://bell")
        self._ringer.connect("inproc://bell")
        self._lock = threading.Lock()  # guards _ringer, and _closing against a late ring
        self._closing = False
        self._outbox: deque[tuple[ControlRequest, str, Fields]] = deque()
        self._parked: dict[bytes, _Parked] = {}  # by peer
        self._thread = threading.Thread(target=self._serve, name=f"control, {name}", daemon=True)
        self._thread.start()

    def answer(self, request: ControlRequest, fields: Fields) -> None:
        """Answer a request that `handle` returned None for. From any thread."""
        self._outbox.append((request, "ok", fields))
        self.wake()

    def refuse(self, request: ControlRequest, reason: str, detail: str) -> None:
        """The same, where it came to nothing."""
        self._outbox.append((request, "error", {"reason": reason, "detail": detail}))
        self.wake()

    def park(
        self, request: ControlRequest, retry: Callable[[], Fields | None], wait_s: float, otherwise: Fields
    ) -> None:
        """In `handle`: answer once `retry()`, tried at each `wake`, gives fields; else `otherwise`.

        A peer waits for one thing at a time: an earlier request of it that is still parked is forgotten.
        """
        if not 0 <= wait_s <= LONGEST_WAIT_S:
            raise ValueError(f"a wait of {wait_s} s is not within 0 and {LONGEST_WAIT_S}")
        self._parked[request.peer] = _Parked(request, retry, time.monotonic() + wait_s, otherwise)

    def wake(self) -> None:
        """Something changed: try parked requests again. From any thread."""
        with self._lock:
            if not self._closing:
                self._ring()

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._ring()
        self._thread.join()
        self._ringer.close()
        self._context.term()

    def _ring(self) -> None:
        with contextlib.suppress(zmq.Again):  # full: the bell is ringing already
            self._ringer.send(b"", zmq.NOBLOCK)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for readable in (self._router, self._bell, self._zap, self._failures):
            poller.register(readable, zmq.POLLIN)
        while not self._closing:
            events = dict(poller.poll(self._until_next_deadline_ms()))
            if self._bell in events:
                self._bell.recv()
                self._on_wake()
            if self._zap in events and self._keys is not None:
                self._zap.send_multipart(self._keys.admit(self._zap.recv_multipart()))
            if self._failures in events:
                parse_monitor_message(self._failures.recv_multipart())
                self.refused += 1
            if self._router in events:
                self._take(self._router.recv_multipart())
            self._retry_parked()
            while self._outbox:
                request, verdict, fields = self._outbox.popleft()
                self._router.send_multipart([request.peer, encode(request.number, verdict, fields)])
        self._router.disable_monitor()
        for each in (self._failures, self._bell, self._zap, self._router):
            each.close()

    def _until_next_deadline_ms(self) -> int | None:
        if not self._parked:
            return None
        return _ms(min(p.deadline for p in self._parked.values()) - time.monotonic())

    def _take(self, frames: list[bytes]) -> None:
        peer = frames[0]
        try:
            request = ControlRequest(peer, *decode(b"".join(frames[1:])))
        except WireError as error:
            self._refuse(ControlRequest(peer, -1, "", {}), "malformed", str(error))
            return
        fields = self._answer_of(request, lambda: self._handle(request))
        if fields is not None:
            self._outbox.append((request, "ok", fields))

    def _answer_of(self, request: ControlRequest, work: Callable[[], Fields | None]) -> Fields | None:
        """None: not yet, or refused."""
        try:
            return work()
        except RefusedError as error:
            self._refuse(request, error.reason, error.detail)
        except (WireError, KeyError, TypeError, ValueError, OverflowError) as error:
            self._refuse(request, "malformed", repr(error))
        except Exception as error:  # the thread serves every generator: one request must not end it
            log.exception("weight control: request %r failed", request.kind)
            self._refuse(request, "failed", repr(error))
        return None

    def _refuse(self, request: ControlRequest, reason: str, detail: str) -> None:
        self.malformed += reason == "malformed"
        self._parked.pop(request.peer, None)
        self._outbox.append((request, "error", {"reason": reason, "detail": detail}))

    def _retry_parked(self) -> None:
        for peer, parked in list(self._parked.items()):
            fields = self._answer_of(parked.request, parked.retry)
            if fields is None and time.monotonic() >= parked.deadline:
                fields = parked.otherwise
            if fields is not None and self._parked.pop(peer, None) is not None:
                self._outbox.append((parked.request, "ok", fields))


class ControlClient:
    """One subscriber's line to one publisher. Not thread-safe: one thread at a time."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        who: str,
        keys: SocketKeys | None = None,
    ) -> None:
        self.endpoint, self.who = endpoint, who
        self._numbers = itertools.count(1)
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        # A publisher that dies cuts the line at once; one whose machine is gone, when heartbeats stop.
        self._dealer.setsockopt(zmq.HEARTBEAT_IVL, _ms(HEARTBEAT_S))
        self._dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ms(SILENCE_S))
        if keys is not None:
            keys.connect(self._dealer)
        self._cut = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED)
        self._poller = zmq.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(self._cut, zmq.POLLIN)
        self._dealer.connect(endpoint)

    def begin(self, kind: str, fields: Mapping[str, Any]) -> int:
        """Send a request; returns its number, for `finish`."""
        number = next(self._numbers)
        try:
            self._dealer.send(encode(number, kind, fields), zmq.NOBLOCK)
        except zmq.Again:
            raise WeightSyncError(
                f"{self.who}: no line to the publisher at {self.endpoint} for a {kind!r}: it is gone, reads nothing, "
                "or has other keys (queue.keys)"
            ) from None
        return number

    def finish(self, number: int, what: str, seconds: float) -> Fields:
        """The answer to a request; answers to requests given up earlier are thrown away.

        Raises DeadlineError when none comes, RefusedError when the publisher refused, WeightSyncError when the
        line was cut.
        """
        deadline = time.monotonic() + seconds
        while events := dict(self._poller.poll(_ms(deadline - time.monotonic()))):
            if self._dealer not in events:
                raise self._cut_while_waiting_for(what)
            answered, verdict, fields = decode(self._dealer.recv())
            if answered != number:
                continue
            if verdict == "ok":
                return fields
            raise RefusedError(str(fields.get("reason", "failed")), str(fields.get("detail", "")))
        raise DeadlineError(self.who, f"the publisher at {self.endpoint}", what, seconds)

    def _cut_while_waiting_for(self, what: str) -> WeightSyncError:
        event = parse_monitor_message(self._cut.recv_multipart())["event"]
        if event & HANDSHAKE_FAILED:
            return WeightSyncError(
                f"{self.who} waited for {what}: the publisher at {self.endpoint} broke off the handshake; it ended, "
                "or it has other keys: set queue.keys to the same folder for learner and generators, or for none"
            )
        return WeightSyncError(f"{self.who} waited for {what}: the publisher at {self.endpoint} is gone")

    def request(self, kind: str, fields: Mapping[str, Any], what: str, seconds: float) -> Fields:
        """`begin` and `finish`."""
        return self.finish(self.begin(kind, fields), what, seconds)

    def close(self) -> None:
        self._dealer.disable_monitor()
        self._cut.close()
        self._dealer.close()


def _ms(seconds: float) -> int:
    """For zmq's polls: rounded up, so that a poll never ends just before the deadline and spins."""
    return max(0, math.ceil(seconds * 1000))
