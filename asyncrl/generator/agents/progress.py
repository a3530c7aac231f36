"""The finished turns of a leased task, kept by the queue for its next lease: `QueueClient.progress`.

    a turn ends ─▸ changed ─▸ all trajectories of the task ─▸ queue     one message at a time; changes during a send
                                                                        go into the next message
    leased again ─▸ the trajectories as they were in the last message

The frames: a header, then the bytes of each trajectory (`trajectory.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgpack

from asyncrl.errors import AsyncRLError
from asyncrl.generator.agents.trajectory import Trajectory

log = logging.getLogger(__name__)

FORMAT = 1

Send = Callable[[Sequence[bytes]], Awaitable[None]]
"""Sends frames to the queue."""


class TaskProgress:
    """The `count` trajectories of one task.

    Args:
        count: Rollouts of the task.
        kept: Frames that came with the lease; unreadable ones are replaced by new trajectories.
        send: None sends nothing.
    """

    def __init__(self, count: int, kept: Sequence[bytes] = (), send: Send | None = None) -> None:
        self.trajectories = _unpack(kept, count)
        self._send, self._newer = send, False
        self._sending: asyncio.Task[None] | None = None

    def changed(self) -> None:
        """Send the trajectories, now or after the message under way."""
        self._newer = True
        if self._send is not None and self._sending is None:
            self._sending = asyncio.create_task(self._send_all(self._send))

    def close(self) -> None:
        """Cancel the message under way."""
        if self._sending is not None:
            self._sending.cancel()

    def frames(self) -> list[bytes]:
        header = msgpack.packb({"format": FORMAT, "trajectories": len(self.trajectories)})
        return [header, *(bytes(trajectory.packed) for trajectory in self.trajectories)]

    async def _send_all(self, send: Send) -> None:
        """A failure (a lost lease, a queue that is gone) ends the sending; the worker's other calls report it."""
        try:
            while self._newer:
                self._newer = False
                await send(self.frames())
        except AsyncRLError as error:
            self._send = None
            log.info("what is finished of a task is not kept any more: %s", error)
        self._sending = None


def _unpack(kept: Sequence[bytes], count: int) -> list[Trajectory]:
    try:
        if kept:
            header, *packed = kept
            if msgpack.unpackb(header) == {"format": FORMAT, "trajectories": count} and len(packed) == count:
                return [Trajectory.unpack(one) for one in packed]
            raise ValueError("other trajectories than those of this config")
    except (ValueError, msgpack.UnpackException) as error:
        log.warning("what was finished of a task cannot be used: %s", error)
    return [Trajectory() for _ in range(count)]
