"""A queue with clients, over sockets or without, and what tests ask of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from local_queue import LocalQueue
from waiting import Clock

from asyncrl.errors import RefusedError
from asyncrl.queue.broker.broker import Broker
from asyncrl.queue.broker.recovery import Recovery
from asyncrl.queue.client.client import QueueClient
from asyncrl.queue.protocol.replies import Claim, Lease, Opened
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.types import Group, Rollout, Sampling, Task

B = 4
LEASE_S = 30.0
TRAIN = StreamSettings(
    groups_per_version=B, max_staleness=1, window=1, depth=2 * B, max_bytes=1 << 30, lease_s=LEASE_S
)
EVAL = StreamSettings(
    groups_per_version=B, max_staleness=None, window=None, depth=8, max_bytes=1 << 30, lease_s=LEASE_S
)
WAIT_S = 20.0


@contextmanager
def serving(broker: Broker) -> Iterator[Broker]:
    """On a thread of its own, which must end with it."""
    thread = threading.Thread(target=broker.serve)
    thread.start()
    try:
        yield broker
    finally:
        broker.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()


class SocketQueue:
    """A running broker and the clients that a test has asked for."""

    def __init__(
        self,
        run: str = "run",
        recovery: Recovery | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.clock = Clock()
        broker = Broker("tcp://127.0.0.1:*", run, clock=clock or self.clock)
        self._end = ExitStack()
        if recovery is not None:
            broker.take_up(recovery.queue, recovery.flush)
            self._end.callback(recovery.close)
        self.address, self.desk = broker.bound_address, broker.dispatcher
        self._end.enter_context(serving(broker))
        self._clients: list[QueueClient] = []

    async def client(self, who: str, run: str = "run") -> QueueClient:
        self._clients.append(QueueClient(self.address, run=run, who=who, deadline_s=WAIT_S))
        await self._clients[-1].connect()
        return self._clients[-1]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        self._end.close()


class ProcessQueue:
    """The same in this event loop, without sockets."""

    def __init__(self, run: str = "run") -> None:
        self.clock = Clock()
        self._queue = LocalQueue(run, clock=self.clock)
        self.desk = self._queue.dispatcher
        self._clients: list[QueueClient] = []

    async def client(self, who: str, run: str = "run") -> QueueClient:
        if not self._clients:
            await self._queue.__aenter__()
        self._clients.append(self._queue.client(who, deadline_s=WAIT_S, run=run))
        await self._clients[-1].connect()
        return self._clients[-1]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        if self._clients:
            await self._queue.__aexit__(None, None, None)


AnyQueue = SocketQueue | ProcessQueue


def tasks(first: int, count: int) -> list[Task]:
    return [Task(o, f"{o}+1=", {"answer": str(o + 1)}) for o in range(first, first + count)]


def group(task: Task, version: int, length: int = 6) -> Group:
    """Two rollouts of the policy's tokens alone, whose ids spell the ordinal."""
    rollout = Rollout(
        token_ids=np.full(length, task.ordinal, np.int64),
        loss_mask=np.ones(length, np.int8),
        logprobs=np.full(length, -0.5, np.float32),
        versions=np.full(length, version, np.int32),
        finish="stop",
        reward=1.0,
    )
    return Group.from_rollouts(task, Sampling(), [rollout, rollout])


def ordinals(things: list[Lease] | list[Group]) -> list[int]:
    return [thing.task.ordinal for thing in things]


async def lease(
    worker: QueueClient, most: int, held: int = 0, stream: str = "train", lineage: int = 0
) -> list:
    return await worker.lease(stream, held=held, lineage=lineage, most=most, wait_s=WAIT_S)


async def claim(learner: QueueClient, opened: Opened, step: int, index: int = 0, rank: int = 0) -> Claim:
    claimed = await learner.claim(
        "train",
        learner_epoch=opened.learner_epoch,
        step=step,
        index=index,
        rank=rank,
        max_tokens=1 << 20,
        whole=True,
        wait_s=WAIT_S,
    )
    assert claimed is not None
    return claimed


async def parked(queue: AnyQueue, count: int) -> None:
    """Until the broker has parked that many requests; every status is a round trip through its loop."""
    watcher = await queue.client("watcher")
    async with asyncio.timeout(WAIT_S):
        while queue.desk.parked < count:
            await watcher.status()


async def refusal(request: Awaitable[object]) -> str:
    with pytest.raises(RefusedError) as refused:
        await request
    return refused.value.reason
