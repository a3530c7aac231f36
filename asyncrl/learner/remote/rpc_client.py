"""One learner rank's line to a pool that trains a model: requests go out in their order, answers come when they come.

any thread ── ask ─▸ outbox ──bell──▸ the line's thread ── DEALER ─▸ ControlServer of the pool
           ◂─ future ────────────────────────┘     ▲── the line is cut: all futures fail, for good
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from typing import Any

import zmq

from asyncrl.errors import AsyncRLError, DeadlineError, PoolLostError, RefusedError, WireError
from asyncrl.sync.stream.control import (
    HANDSHAKE_FAILED,
    HEARTBEAT_S,
    MAX_BYTES,
    SILENCE_S,
    Fields,
    SocketKeys,
    decode,
    encode,
)

RpcAnswer = Future[Fields]


class RpcClient:
    """who, whom: for errors, e.g. 'learner rank 0', 'the pool of the critic'."""

    def __init__(self, endpoint: str, who: str, whom: str, keys: SocketKeys | None = None) -> None:
        self.who, self.whom = who, f"{whom} at {endpoint}"
        self._numbers = itertools.count(1)
        self._waiting: dict[int, RpcAnswer] = {}
        self._outbox: deque[bytes] = deque()
        self._lost: AsyncRLError | None = None
        self._lock = threading.Lock()  # guards all of these, and _ringer
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.set_hwm(0)  # what a version is made of, at most
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        # A pool that dies cuts the line at once; one whose machine is gone, when heartbeats stop.
        self._dealer.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
        self._dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_S * 1000))
        if keys is not None:
            keys.connect(self._dealer)
        self._cut = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED)
        self._bell, self._ringer = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._bell.bind("inproc://bell")
        self._ringer.connect("inproc://bell")
        self._dealer.connect(endpoint)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"line to {whom}", daemon=True)
        self._thread.start()

    def ask(self, kind: str, fields: Mapping[str, Any]) -> RpcAnswer:
        """Does not wait. The future fails with RefusedError, or with PoolLostError once the line is cut."""
        answer: RpcAnswer = Future()
        with self._lock:
            if self._lost is not None:
                answer.set_exception(self._lost)
                return answer
            number = next(self._numbers)
            self._waiting[number] = answer
            self._outbox.append(encode(number, kind, fields))
            self._ring()
        return answer

    def wait(self, answer: RpcAnswer, what: str, seconds: float) -> Fields:
        """Raises what the future fails with, and DeadlineError. what: e.g. 'the gradient norm for version 7'."""
        try:
            return answer.result(seconds)
        except NotInTime:
            raise DeadlineError(self.who, self.whom, what, seconds) from None
        except PoolLostError as lost:
            raise PoolLostError(f"{lost}; it was to give {what}") from None

    def check(self) -> None:
        """Raises PoolLostError once the line is cut."""
        with self._lock:
            if self._lost is not None:
                raise self._lost

    def close(self) -> None:
        """What has no answer yet fails."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._ring()
        self._thread.join()
        self._ringer.close(0)
        self._context.term()

    def _ring(self) -> None:
        with suppress(zmq.Again):  # full: the bell is ringing already; or the line is cut
            self._ringer.send(b"", zmq.NOBLOCK)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for readable in (self._dealer, self._bell, self._cut):
            poller.register(readable, zmq.POLLIN)
        why = "the line was closed"
        while not self._closing:
            events = dict(poller.poll())
            if self._bell in events:
                self._bell.recv()
                self._send()
            if self._dealer in events:
                self._hear(self._dealer.recv())
            elif self._cut in events:
                why = "it has ended, or has other keys (queue.keys)"
                break
        self._give_up(PoolLostError(f"{self.who} has lost {self.whom}: {why}"))
        self._dealer.disable_monitor()
        for each in (self._dealer, self._bell, self._cut):
            each.close(0)

    def _send(self) -> None:
        with self._lock:
            messages, self._outbox = self._outbox, deque()
        for message in messages:
            self._dealer.send(message)

    def _hear(self, message: bytes) -> None:
        try:
            number, verdict, fields = decode(message)
        except WireError as error:
            self._give_up(PoolLostError(f"{self.who} cannot read what {self.whom} says: {error}"))
            return
        with self._lock:
            answer = self._waiting.pop(number, None)
        if answer is None:
            return
        if verdict == "ok":
            answer.set_result(fields)
        else:
            reason, detail = fields.get("reason", "failed"), fields.get("detail", "")
            answer.set_exception(RefusedError(str(reason), f"{self.whom}: {detail}"))

    def _give_up(self, lost: AsyncRLError) -> None:
        with self._lock:
            self._lost = self._lost or lost
            waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(self._lost)
