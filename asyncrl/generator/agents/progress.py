"""What is finished of a leased task, handed on with the lease: `QueueClient.progress`.

    a turn ends ─▸ note ─▸ all trajectories of the task ─▸ queue        one message at a time; while one is under way,
                                                                        what comes meanwhile waits for the next
    re-leased ─▸ the trajectories as they were when the last message left

The frames: what follows, then each trajectory's own bytes (`trajectory.py`).
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
"""Hands frames to the queue."""


class TaskProgress:
    """The trajectories of one task, of which there are `count`.

    kept  the frames that came with the lease; what this process cannot read is made anew
    send  none: nothing is handed on
    """

    def __init__(self, count: int, kept: Sequence[bytes] = (), send: Send | None = None) -> None:
        self.trajectories = _read(kept, count)
        self._send, self._newer = send, False
        self._sending: asyncio.Task[None] | None = None

    def note(self) -> None:
        """Something has been finished."""
        self._newer = True
        if self._send is not None and self._sending is None:
            self._sending = asyncio.create_task(self._hand_on(self._send))

    def close(self) -> None:
        """What is under way is given up."""
        if self._sending is not None:
            self._sending.cancel()

    def frames(self) -> list[bytes]:
        header = msgpack.packb({"format": FORMAT, "trajectories": len(self.trajectories)})
        return [header, *(bytes(trajectory.packed) for trajectory in self.trajectories)]

    async def _hand_on(self, send: Send) -> None:
        """Whatever refuses it, a lost lease or a queue that is gone, is for others to act on."""
        try:
            while self._newer:
                self._newer = False
                await send(self.frames())
        except AsyncRLError as error:
            self._send = None
            log.info("what is finished of a task is not kept any more: %s", error)
        self._sending = None


def _read(kept: Sequence[bytes], count: int) -> list[Trajectory]:
    try:
        if kept:
            header, *packed = kept
            if msgpack.unpackb(header) == {"format": FORMAT, "trajectories": count} and len(packed) == count:
                return [Trajectory.unpack(one) for one in packed]
            raise ValueError("other trajectories than those of this config")
    except (ValueError, msgpack.UnpackException) as error:
        log.warning("what was finished of a task cannot be used: %s", error)
    return [Trajectory() for _ in range(count)]
