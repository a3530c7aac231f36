"""The broker: one ROUTER socket, one thread, one loop. Everybody connects to it; it connects to nobody.

        ┌──────────────────────────────── serve() ────────────────────────────────┐
        │  poll ─▸ take what has come ─▸ answer, or park ─▸ expire leases ─┐      │
        │   ▴                                                              ▾      │
        │   └──────── answer the parked that can be, or whose wait is over ◂┘     │
        └──────────────────────────────────────────────────────────────────────────┘

    parked request        unparked by
    feeder     room       a lease that takes a pending task
    generator  lease      submit, trained (admission moves), give_back or an expired lease, claim (room)
    learner    claim      commit;  trained, for a rank that is a step ahead
    anyone     lookup     post
    all of them           finish, or their own wait_s

Nobody waits longer than the wait_s it asked for. A request that comes twice (its sender saw no answer) is
answered from the replies kept per client, or is parked already. Payload frames are passed on, never copied.
"""

from __future__ import annotations

import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq

from asyncrl.errors import ConfigError, WireError
from asyncrl.queue import wire
from asyncrl.queue.service import QueueService, Reply, Request

TICK_S = 0.1
"""Longest pause between two looks at deadlines."""

BURST = 256
"""Messages taken between two looks at the parked requests."""

KEPT_REPLIES = {"lease": 8, "commit": 64, "drop": 64, "give_back": 8, "open": 4, "collect": 1, "reject": 1}
"""Operations whose second execution would not answer like the first: how many replies are kept per client."""

MAX_CLIENTS = 1024
"""Clients whose replies are kept; the one silent for longest is forgotten first."""


@dataclass(slots=True)
class Parked:
    request: Request
    until: float


class Broker:
    """Binds at once; `serve` runs the loop until `stop`, which any thread or signal handler may call.

    ConfigError if the address cannot be bound.
    """

    def __init__(self, address: str, run: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.service = QueueService(run)
        self._clock = clock
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # In flight is bounded by the ledger's depth, not by silently dropped messages.
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.bound_address = self._bind(address)
        self._wake_in, self._wake_out = socket.socketpair()
        self._parked: OrderedDict[tuple[bytes, int], Parked] = OrderedDict()
        self._replies: OrderedDict[bytes, dict[str, deque[tuple[int, list[Any]]]]] = OrderedDict()
        self._tried_at = -1

    def stop(self) -> None:
        """End `serve` soon. Again, or afterwards: nothing."""
        with suppress(OSError):
            self._wake_out.send(b"x")

    def close(self) -> None:
        """Free the address, if `serve` has not done it."""
        self._socket.close()
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()

    def serve(self) -> None:
        """Answer until stopped, then close the socket."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(int(TICK_S * 1000)))
                if self._wake_in.fileno() in ready:
                    return
                if self._socket in ready:
                    self._take()
                self.service.expire(self._clock())
                self._retry_parked()
        finally:
            self.close()

    # ------------------------------------------------------------------ the loop's steps

    def _take(self) -> None:
        for _ in range(BURST):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = frames[0].bytes
            try:
                request_id, request = _parse(frames[1:])
            except WireError as error:
                self.service.refused["malformed"] += 1
                self._send(identity, -1, Reply(error=("wire", "", str(error))))
                continue
            self._serve_one(identity, request_id, request)

    def _serve_one(self, identity: bytes, request_id: int, request: Request) -> None:
        if (identity, request_id) in self._parked:
            return
        for kept_id, message in self._replies.get(identity, {}).get(request.op, ()):
            if kept_id == request_id:
                self._socket.send_multipart([identity, *message], copy=False)
                return
        if request.op == "cancel":
            self._cancel(identity, request.args.get("id"))
            return
        now = self._clock()
        reply = self.service.answer(request, now)
        if reply is None:
            self._parked[identity, request_id] = Parked(request, now + request.wait_s)
        else:
            self._reply(identity, request_id, request, reply)

    def _cancel(self, identity: bytes, request_id: Any) -> None:
        """Its sender waits no more. What it was granted before, it gives back itself."""
        if isinstance(request_id, int) and (identity, request_id) in self._parked:
            del self._parked[identity, request_id]
            self._send(identity, request_id, Reply())

    def _retry_parked(self) -> None:
        """One answer may make way for another (a lease makes room for the feeder): on until nothing moves."""
        now = self._clock()
        while True:
            changes = self.service.changes
            moved, self._tried_at = changes != self._tried_at, changes
            for key, parked in list(self._parked.items()):
                late = now >= parked.until
                reply = self.service.answer(parked.request, now, late) if moved or late else None
                if reply is not None:
                    del self._parked[key]
                    self._reply(*key, parked.request, reply)
            if self.service.changes == changes:
                return

    # ------------------------------------------------------------------ answers

    def _reply(self, identity: bytes, request_id: int, request: Request, reply: Reply) -> None:
        message = self._send(identity, request_id, reply)
        if request.op == "goodbye":
            self._forget(identity)
        elif request.op in KEPT_REPLIES:
            replies = self._replies.setdefault(identity, {})
            kept = replies.setdefault(request.op, deque(maxlen=KEPT_REPLIES[request.op]))
            kept.append((request_id, message))
            self._replies.move_to_end(identity)
            if len(self._replies) > MAX_CLIENTS:
                self._replies.popitem(last=False)

    def _send(self, identity: bytes, request_id: int, reply: Reply) -> list[Any]:
        envelope = {"id": request_id, "value": reply.value, "error": reply.error}
        message = [wire.pack(envelope), *reply.frames]
        self._socket.send_multipart([identity, *message], copy=False)
        return message

    def _forget(self, identity: bytes) -> None:
        self._replies.pop(identity, None)
        for key in [key for key in self._parked if key[0] == identity]:
            del self._parked[key]

    def _bind(self, address: str) -> str:
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            taken = error.errno == zmq.EADDRINUSE
            rule = "another process uses this address" if taken else f"cannot be bound: {error}"
            remedy = "stop that process, choose another port, or set queue.address=tcp://127.0.0.1:*"
            raise ConfigError("queue.address", address, rule, remedy) from error
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _parse(frames: list[Any]) -> tuple[int, Request]:
    """Request id and request of the frames behind the identity."""
    if not frames:
        raise WireError("a message without an envelope")
    message = wire.unpack(frames[0].buffer)
    fields = {"id": int, "op": str, "run": str, "session": str, "args": dict}
    for name, kind in fields.items():
        if type(message.get(name)) is not kind:
            raise WireError(f"envelope: {name} = {message.get(name)!r} must be {kind.__name__}")
    request = Request(message["op"], message["run"], message["session"], message["args"], tuple(frames[1:]))
    _ = request.wait_s  # refused before anything is done, not when it is parked
    return message["id"], request
