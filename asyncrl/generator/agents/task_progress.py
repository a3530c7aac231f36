"""The finished turns of a leased task, which the queue keeps for its next lease (`QueueClient.progress`).

a turn ends ─▸ changed ─▸ all trajectories of the task ─▸ queue     one message at a time; changes during a send
                                                                    go into the next message
the rollouts are cancelled ─▸ what no message has is left in `Keep.unsent`, for a worker that gives the lease back
leased again ─▸ the trajectories as they were in the last message
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgpack

from asyncrl.errors import AsyncRLError
from asyncrl.generator.agents.trajectory import Trajectory
from asyncrl.types import Array

log = logging.getLogger(__name__)

LARGEST_VOCABULARY = 1 << 31

FORMAT = 1
"""The format of the frames: a header, then the bytes of each trajectory."""

Send = Callable[[Sequence[bytes]], Awaitable[None]]
"""Sends frames to the queue."""


@dataclass(slots=True)
class Keep:
    """Keeps one leased task. unsent: frames newer than those of the last message, once its rollouts are
    cancelled."""

    send: Send
    unsent: Sequence[bytes] = ()


class TaskProgress:
    """The `count` trajectories of one task.

    kept  frames that came with the lease; unreadable ones, and those with tokens outside of the vocabulary, are
          replaced by new trajectories
    keep  None keeps nothing
    kind  of which they are: `Trajectory`, or what has its `unpack`, `packed`, `ids`, `length` and `interrupted`
    sent  tokens of the trajectories in the last message

    As a context manager it sends nothing any more once the block ends.
    """

    def __init__(
        self,
        count: int,
        kept: Sequence[bytes] = (),
        keep: Keep | None = None,
        vocabulary: int = LARGEST_VOCABULARY,
        kind: Any = Trajectory,
    ) -> None:
        self.trajectories = _unpack(kept, count, vocabulary, kind)
        self._keep, self._newer = keep, False
        self.sent = self._tokens
        self._sending: asyncio.Task[None] | None = None

    def changed(self) -> None:
        """Send the trajectories, now or after the message under way."""
        self._newer = True
        if self._keep is not None and self._sending is None:
            self._sending = asyncio.create_task(self._send_all(self._keep.send))

    def grown(self, every: int) -> None:
        """As `changed`, once as many tokens are new as all turns under way have in `every` steps of the engine."""
        under_way = sum(trajectory.interrupted for trajectory in self.trajectories)
        if self._tokens - self.sent >= every * max(1, under_way):
            self.changed()

    @property
    def _tokens(self) -> int:
        return sum(trajectory.length for trajectory in self.trajectories)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the message under way, and send none after it."""
        newer = self._newer or self._sending is not None or self._tokens > self.sent
        if self._keep is not None and isinstance(error, asyncio.CancelledError) and newer:
            self._keep.unsent = self.frames()
        self._keep = None
        if self._sending is not None:
            self._sending.cancel()

    def frames(self) -> list[bytes]:
        header = msgpack.packb({"format": FORMAT, "trajectories": len(self.trajectories)})
        return [header, *(bytes(trajectory.packed) for trajectory in self.trajectories)]

    async def _send_all(self, send: Send) -> None:
        """A failure (a lost lease, a queue that is gone) ends the sending; the worker's other calls report it."""
        try:
            while self._newer:
                self._newer, self.sent = False, self._tokens
                await send(self.frames())
        except AsyncRLError as error:
            self._keep = None
            log.info("what is finished of a task is not kept any more: %s", error)
        self._sending = None


def _unpack(kept: Sequence[bytes], count: int, vocabulary: int, kind: Any) -> list[Any]:
    try:
        if kept:
            header, *packed = kept
            if msgpack.unpackb(header) == {"format": FORMAT, "trajectories": count} and len(packed) == count:
                unpacked = [kind.unpack(one) for one in packed]
                if not all(_known(one.ids, vocabulary) for one in unpacked):
                    raise ValueError(f"tokens outside of the vocabulary of {vocabulary}")
                return unpacked
            raise ValueError("other trajectories than those of this config")
    except (ValueError, msgpack.UnpackException) as error:
        log.warning("what was finished of a task cannot be used: %s", error)
    return [kind() for _ in range(count)]


def _known(ids: Array, vocabulary: int) -> bool:
    """Whether all tokens are in the vocabulary."""
    return bool(((ids >= 0) & (ids < vocabulary)).all())
