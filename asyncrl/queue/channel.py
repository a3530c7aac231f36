"""Requests to the broker and their replies, over one socket of an event loop.

    caller ── ask(op, …) ──▸ send ──▸ wait for the reply with this request's id ──▸ value, or error raised
                              ▴                    │ none for RESEND_S
                              └────────────────────┘ until wait_s and the deadline are over: DeadlineError

The broker answers a request that comes twice only once, so that sending again is always safe; the socket
reconnects by itself. Any number of requests may be under way at once.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from asyncrl.errors import DeadlineError, RefusedError, RunClosedError, WireError
from asyncrl.queue import wire

RESEND_S = 5.0
"""After this long without an answer a request is sent again."""

GOODBYE_S = 2.0
"""Longest wait of `close` for the broker."""


@dataclass(frozen=True, slots=True)
class Answer:
    value: Any
    frames: list[zmq.Frame]


class Channel:
    """`who` names this side in errors and in the queue's status; a session is one life of it."""

    def __init__(self, address: str, run: str, who: str, deadline_s: float) -> None:
        self.address, self.run, self.who, self.deadline_s = address, run, who, deadline_s
        self._session = f"{who}/{uuid.uuid4().hex[:12]}"
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._abandoned: dict[int, str] = {}  # lease requests that nobody waits for, and their stream
        self._background: set[asyncio.Task[None]] = set()
        self._context: zmq.asyncio.Context | None = None

    def open(self) -> None:
        """Connect in the background. Again: nothing."""
        if self._context is not None:
            return
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._socket.connect(self.address)
        self._spawn(self._receive())

    async def close(self) -> None:
        """Say goodbye, which gives all leases back, and disconnect. Again: nothing."""
        if self._context is None:
            return
        with suppress(DeadlineError, RefusedError, WireError):
            await self.ask("goodbye", deadline_s=min(GOODBYE_S, self.deadline_s))
        running = list(self._background)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._socket.close()
        self._context.term()
        self._context = None

    async def ask(
        self,
        op: str,
        args: Mapping[str, Any] | None = None,
        frames: Sequence[wire.Buffer] = (),
        wait_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> Answer:
        """One request. wait_s: how long the broker may park it before it must answer."""
        if self._context is None:
            raise RefusedError("disconnected", f"{self.who} is not connected to the queue")
        request_id = next(self._ids)
        args = {**(args or {}), "wait_s": wait_s} if wait_s else dict(args or {})
        message = [self._envelope(request_id, op, args), *frames]
        answer = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        try:
            return await self._answered(answer, message, op, wait_s + (deadline_s or self.deadline_s))
        except (asyncio.CancelledError, DeadlineError):
            if op == "lease":
                self._abandoned[request_id] = args["stream"]
                if answer.done() and not answer.cancelled() and answer.exception() is None:
                    # Granted, but cancelled before the caller could resume.
                    self._hand_back(request_id, answer.result().value)
            self._socket.send(self._envelope(next(self._ids), "cancel", {"id": request_id}))
            raise
        finally:
            del self._waiting[request_id]

    async def _answered(
        self, answer: asyncio.Future[Answer], message: list[Any], op: str, seconds: float
    ) -> Answer:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0:
            # Not awaited: without a high-water mark a send only queues.
            self._socket.send_multipart(message, copy=False)
            done, _ = await asyncio.wait([answer], timeout=min(RESEND_S, left))
            if done:
                return answer.result()
        raise DeadlineError(self.who, f"the queue at {self.address}", f"an answer to '{op}'", seconds)

    def _envelope(self, request_id: int, op: str, args: Mapping[str, Any]) -> bytes:
        message = {"id": request_id, "op": op, "run": self.run, "session": self._session, "args": args}
        return wire.pack(message)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            # What is no reply, and a second answer, finds nobody waiting.
            with suppress(WireError):
                self._hand_over(wire.unpack(frames[0].buffer), frames[1:])

    def _hand_over(self, reply: Mapping[str, Any], frames: list[zmq.Frame]) -> None:
        request_id = reply.get("id")
        if not isinstance(request_id, int):
            return
        answer, error = self._waiting.get(request_id), reply.get("error")
        if answer is not None and not answer.done():
            if error is None:
                answer.set_result(Answer(reply.get("value"), frames))
            else:
                answer.set_exception(_raised(*error))
        else:
            self._hand_back(request_id, reply.get("value"))

    def _hand_back(self, request_id: int, granted: Any) -> None:
        """Leases that nobody waits for any more."""
        stream = self._abandoned.pop(request_id, None)
        if stream and granted:
            self._spawn(self._return(stream, [[ordinal, epoch] for ordinal, epoch, _ in granted]))

    async def _return(self, stream: str, leases: list[list[int]]) -> None:
        # If this fails too, the leases end by themselves, since nobody renews them.
        with suppress(RefusedError, DeadlineError):
            await self.ask("give_back", {"stream": stream, "leases": leases})

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _raised(kind: str, reason: str, detail: str) -> Exception:
    if kind == "closed":
        return RunClosedError(detail)
    return RefusedError(reason, detail) if kind == "refused" else WireError(detail)
