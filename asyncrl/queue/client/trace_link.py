"""The trace of this process and the queue: the queue's clock, and the way of its rows where the run folder is another.

    run folder shared   the process writes RUN/trace/<process>.jsonl itself ── every CLOCK_S ──▸ the queue's time
    not shared          the same file on its own machine ── as it grows ──▸ queue ──▸ RUN/trace/<process>.jsonl there

The queue's process puts a file with a random name into its trace folder; a process that sees it shares the folder.
The own file is the buffer: an event counts the times that rows were removed before they could be sent.
Nobody waits for this link, and it ends without a failure.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from asyncrl.errors import AsyncRLError, RefusedError, WireError
from asyncrl.queue.protocol.requests import TRACE_BYTES, TraceRequest
from asyncrl.telemetry import tracing
from asyncrl.telemetry.clock_offset import ClockOffset
from asyncrl.telemetry.trace_file import TraceTail

log = logging.getLogger(__name__)

SEND_S, CLOCK_S = 1.0, 10.0
"""Between two requests: while rows are sent; for the time alone."""

MOST_AT_ONCE = 16
"""Requests one after the other, each with TRACE_BYTES of rows at most."""

LAST_ROWS_S = 2.0
"""How long the end of a process may take to send its last rows."""

MARK = re.compile(r"queue-[0-9a-f]{16}")
"""The name of the queue's file."""

Exchange = Callable[[TraceRequest], Awaitable[Mapping[str, Any]]]


class TraceLink:
    """exchange: sends a request to the queue · mark: the name of the queue's file; empty: it takes no rows

    sends_rows: whether the run folder is another than the queue's. A queue that is started again changes nothing.
    """

    def __init__(self, trace: tracing.Trace, exchange: Exchange, mark: str) -> None:
        self._trace, self._exchange = trace, exchange
        self.sends_rows = bool(MARK.fullmatch(mark)) and not trace.path.with_name(mark).exists()
        self._clock, self._noted = ClockOffset(), (0.0, float("inf"))
        self._tail, self._unsent, self._missed = TraceTail(trace.path), b"", 0

    def observe(self, sent: float, there: float, received: float) -> None:
        """A reply with the queue's time `there`; the others by the trace's clock."""
        if self._clock.observe(sent, there, received) and (settled := self._clock.settled()) != self._noted:
            self._noted = settled
            self._trace.note_clock(*settled)

    async def run(self) -> None:
        """Until cancelled."""
        pause_s = SEND_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self.send()
            except (RefusedError, WireError) as error:
                log.warning("the queue takes no rows of the trace %s: %s", self._trace.process, error)
                self.sends_rows = False
            except AsyncRLError:
                pass  # the queue is gone: rows wait in the file
            pause_s = SEND_S if self.sends_rows else min(2 * pause_s, CLOCK_S)

    async def send(self) -> None:
        """Send the rows that are there, at most those of some seconds; without any, the request is for the time."""
        for _ in range(MOST_AT_ONCE):
            more = await self._send_some() if self.sends_rows else await self._request(b"")
            if not more:
                return

    async def close(self) -> None:
        """Send the last rows, if some are to be sent."""
        with suppress(AsyncRLError, TimeoutError):
            if self.sends_rows:
                async with asyncio.timeout(LAST_ROWS_S):
                    await self.send()

    async def _send_some(self) -> bool:
        """Whether there may be more."""
        rows = self._unsent = self._unsent or self._tail.read(TRACE_BYTES)
        if self._tail.missed > self._missed:
            self._missed = self._tail.missed
            tracing.event("rows_missed", times=self._missed)
        taken = await self._request(rows)
        if taken:
            self._unsent = b""
        return taken and len(rows) > TRACE_BYTES // 2

    async def _request(self, rows: bytes) -> bool:
        """Whether the queue has taken rows."""
        sent = self._trace.now()
        reply = await self._exchange(TraceRequest(process=self._trace.process, rows=rows))
        self.observe(sent, reply["time"], self._trace.now())
        return bool(rows) and bool(reply["taken"])
