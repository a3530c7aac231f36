"""A whole queue in one event loop, without sockets.

>>> async def hello():
...     async with LocalQueue("demo") as queue:
...         return (await queue.client("me").connect()).run
>>> asyncio.run(hello())
'demo'

The dispatcher and the clients (session.py) are those of a real queue; only the wire between them is short.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

from asyncrl.queue.broker.dispatcher import Dispatcher, OutgoingReply
from asyncrl.queue.broker.queue_state import QueueState
from asyncrl.queue.client.client import QueueClient
from asyncrl.queue.client.link import Listener

TICK_S = 0.1
"""Longest pause between two looks at deadlines."""


class LocalQueue:
    """Use it as an async context; its clients are closed one by one, or go with it."""

    def __init__(
        self,
        run: str = "local",
        *,
        clock: Callable[[], float] = time.monotonic,
        queue: QueueState | None = None,
        before_send: Callable[[], None] = lambda: None,
    ) -> None:
        self.run, self._before_send = run, before_send
        self.dispatcher = Dispatcher(queue or QueueState(run))
        self.links: dict[bytes, LocalLink] = {}
        self._clock = clock
        self._inbox: deque[tuple[bytes, list[bytes]]] = deque()
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._serving = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._serving.cancel()
        with suppress(asyncio.CancelledError):
            await self._serving

    def client(self, who: str, deadline_s: float = 60.0, run: str | None = None) -> QueueClient:
        """A client of this queue, on this event loop."""
        return QueueClient(
            "this process", run=run or self.run, who=who, deadline_s=deadline_s, link=LocalLink(self)
        )

    def post(self, identity: bytes, frames: Sequence[Any]) -> None:
        """A client's message. Copied, as a wire would: a sender may reuse its arrays."""
        self._inbox.append((identity, [bytes(frame) for frame in frames]))
        self._news.set()

    async def _serve(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), TICK_S)
            self._news.clear()
            replies: list[OutgoingReply] = []
            while self._inbox:
                replies += self.dispatcher.receive(*self._inbox.popleft(), self._clock())
            replies += self.dispatcher.tick(self._clock())
            self._before_send()
            for reply in replies:
                if reply.identity in self.links:
                    self.links[reply.identity].deliver(reply.frames)


class LocalLink:
    """A client's end."""

    address = "this process"

    def __init__(self, queue: LocalQueue) -> None:
        self._queue, self._identity = queue, uuid.uuid4().bytes
        self._listener: Listener | None = None

    def open(self, listener: Listener) -> None:
        self._listener = listener
        self._queue.links[self._identity] = self

    def send(self, frames: Sequence[Any]) -> None:
        self._queue.post(self._identity, frames)

    def renew(self) -> None:
        """Nothing is lost here."""

    def close(self) -> None:
        self._listener = None
        del self._queue.links[self._identity]

    def deliver(self, frames: Sequence[Any]) -> None:
        if self._listener is not None:
            self._listener.received(frames)
