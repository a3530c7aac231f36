"""Requests to the broker and their replies, on an event loop: the shell around `session.py`.

    caller ── request ──▸ session ──▸ link ──▸ broker
       ▴                     ▴ ▴        │
       └── value, or error ◂─┘ │        │ reply, (re)connected
                    timer ─────┴────────┘

Any number of requests may be under way at once. Each ends with its reply or at its deadline; a link may lose
messages, or be gone for a while.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from asyncrl.errors import AsyncRLError, RefusedError
from asyncrl.queue.client.link import Link
from asyncrl.queue.client.session import Outcome, ReplyValue, Session, Undo
from asyncrl.queue.protocol.requests import GoodbyeRequest, Request
from asyncrl.queue.wire import wire
from asyncrl.telemetry.status import ProcessStatus

GOODBYE_S = 2.0
"""Longest wait of `close` for the broker."""


class Connection:
    """`who` names this side in errors and in the queue's status; a session is one life of it.

    status: of this process, which shows the wait for a broker that is gone
    """

    def __init__(
        self, link: Link, run: str, who: str, deadline_s: float, status: ProcessStatus | None = None
    ) -> None:
        self.address, self.who, self.deadline_s = link.address, who, deadline_s
        self._status, self._broker = status or ProcessStatus(), f"the queue at {link.address}"
        self._up = True
        self._link = link
        self._session = Session(run, f"{who}/{uuid.uuid4().hex[:12]}", link.address)
        self._waiting: dict[int, asyncio.Future[ReplyValue]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._rejected: AsyncRLError | None = None
        self._flushing = False

    def open(self) -> None:
        """Connect in the background. Idempotent. ConfigError for an invalid address."""
        if self._loop is None:
            self._link.open(self)
            self._loop = asyncio.get_running_loop()
            self._note_wait()

    async def close(self) -> None:
        """Send goodbye, which gives all leases back, and disconnect, even if cancelled. Idempotent."""
        if self._loop is None:
            return
        try:
            with suppress(AsyncRLError):
                await self.request(GoodbyeRequest(), deadline_s=min(GOODBYE_S, self.deadline_s))
        finally:
            self._end()

    def _end(self) -> None:
        if self._loop is None:  # a second `close` meanwhile
            return
        self._fail_all(self._disconnected())
        if self._timer is not None:
            self._timer.cancel()
        self._link.close()
        self._loop = self._timer = None
        self._status.wait_ends(self._broker)

    async def request(
        self,
        request: Request,
        frames: Sequence[wire.Buffer] = (),
        deadline_s: float | None = None,
        undo: Undo | None = None,
    ) -> ReplyValue:
        """Send a request and return its reply, which comes within its `wait_s` and the deadline.

        undo: the request that gives the grant back when the caller has gone by then.
        """
        if self._loop is None:
            raise self._disconnected()
        if self._rejected is not None:
            raise self._rejected
        seconds, now = deadline_s or self.deadline_s, self._loop.time()
        number = self._session.request(request, frames, seconds, now, undo)
        reply = self._waiting[number] = self._loop.create_future()
        self._note_wait()
        self._flush()
        try:
            return await reply
        except asyncio.CancelledError:
            if self._loop is None:  # closed meanwhile, which gives back all
                raise
            self._session.abandon(number)
            granted = reply.done() and not reply.cancelled() and reply.exception() is None
            if granted and undo is not None:  # but cancelled before the caller could resume
                self._session.undo(undo, reply.result().value, self._loop.time())
            self._flush()
            raise
        finally:
            del self._waiting[number]

    def give_back(self, undo: Undo, granted: Any) -> None:
        """Give a grant back without waiting. It does nothing once the connection is closed, which gives back all."""
        if self._loop is not None:
            self._session.undo(undo, granted, self._loop.time())
            self._flush()

    # ------------------------------------------------------------------ the link's side

    def received(self, frames: Sequence[Any]) -> None:
        if self._loop is not None:
            self._settle(self._session.receive(frames, self._loop.time()))

    def connected(self) -> None:
        self._up = True
        self._status.wait_ends(self._broker)
        if self._loop is not None:
            self._session.reconnected(self._loop.time())
            self._flush()

    def disconnected(self) -> None:
        self._up = False
        self._note_wait()

    def rejected(self, error: AsyncRLError) -> None:
        self._rejected = error
        self._fail_all(error)

    # ------------------------------------------------------------------ the session's side

    def _on_time(self) -> None:
        self._timer = None
        if self._loop is not None:
            self._settle(self._session.tick(self._loop.time()))
            if self._up and self._session.renew_due(self._loop.time()):
                self._link.renew()
            self._note_wait()

    def _note_wait(self) -> None:
        """While the broker is gone, the status has the wait for it, up to the first deadline of a request."""
        if self._up or self._loop is None:
            return
        deadline = self._session.first_deadline()
        left_s = None if deadline is None else max(0.0, deadline - self._loop.time())
        self._status.wait_begins(self._broker, left_s)

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            answer = self._waiting.get(outcome.number)
            if answer is None or answer.done():  # the caller was cancelled, but has not resumed yet
                if outcome.undo is not None and isinstance(outcome.result, ReplyValue):
                    self.give_back(outcome.undo, outcome.result.value)
            elif isinstance(outcome.result, Exception):
                answer.set_exception(outcome.result)
            else:
                answer.set_result(outcome.result)
        self._flush()

    def _flush(self) -> None:
        """Send at the end of this turn of the loop: the requests of all its tasks in one message."""
        assert self._loop is not None
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._flushing = False
        if self._loop is None:  # closed meanwhile
            return
        for message in self._session.outgoing():
            self._link.send(message)
        due = self._session.next_time()
        if due is None or (self._timer is not None and self._timer.when() <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._on_time)

    def _fail_all(self, error: AsyncRLError) -> None:
        self._session.abandon_all()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)

    def _disconnected(self) -> RefusedError:
        return RefusedError("disconnected", f"{self.who} is not connected to the queue")
