"""Who works with the simulated queue: the real client and feeder, and what is done around them in a few lines.

    feeder    asyncrl.queue.feeder, in the broker's process
    worker    intake, a heartbeat, and one coroutine a lease (generator/worker.py)
    scorer    takes groups through a stage
    learner   see learner.py

A process that is killed falls silent in the middle of whatever it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from asyncrl.errors import RefusedError, RunClosedError, SourceEndedError
from asyncrl.queue.client.client import QueueClient
from asyncrl.queue.feeder import feed
from asyncrl.queue.protocol.replies import Lease
from asyncrl.types import NO_VERSION, Group, Rollout, Sampling, Task

from .network import SimLink

if TYPE_CHECKING:
    from .world import World

TRAIN, EVAL = "train", "eval"
DEADLINE_S = 300.0
HEARTBEAT_S = 4.0
PARK_S = 6.0

Policy = tuple[int, int]
"""(lineage, version)"""

NO_POLICY: Policy = (-1, NO_VERSION)


class Process:
    """One life of it."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.links: list[SimLink] = []
        self._tasks: list[asyncio.Task[None]] = []

    def client(self, who: str) -> QueueClient:
        link = SimLink(self.world.network, self.world.next_identity(who))
        self.links.append(link)
        return QueueClient("", run=self.world.run, who=who, deadline_s=DEADLINE_S, link=link)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.world.loop.create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._ended)
        return task

    def kill(self) -> None:
        for link in self.links:
            link.close()
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.remove(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, RunClosedError):
            self.world.failed(self, error)


class Feeder(Process):
    async def run(self) -> None:
        client = self.client(self.name)
        await client.connect()
        await feed(client, TRAIN, self._task_at)

    def _task_at(self, ordinal: int) -> Task:
        if ordinal >= self.world.plan.tasks:
            raise SourceEndedError
        return Task(ordinal, str(ordinal))


class Worker(Process):
    """policy: what it has flipped to."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.policy = NO_POLICY
        self.frozen_until = 0.0
        self._flipped = asyncio.Event()
        self._working: dict[tuple[str, int, int], asyncio.Task[None]] = {}

    def flip(self, policy: Policy) -> None:
        if policy > self.policy:
            self.policy = policy
            self._flipped.set()

    async def run(self) -> None:
        self._client = self.client(self.name)
        await self._client.connect()
        await self._client.lookup("weights/0", wait_s=DEADLINE_S)
        self.start(self._renew())
        if self.world.plan.evaluations:
            self.start(self._intake(EVAL))
        await self._intake(TRAIN)

    async def _intake(self, stream: str) -> None:
        while True:
            while self.policy == NO_POLICY:
                await self._next_flip()
            asked = self.start(self._ask(stream, *self.policy))
            newer = self.start(self._next_flip())
            # A request parked under an old version admits less than the new one would.
            await asyncio.wait({asked, newer}, return_when=asyncio.FIRST_COMPLETED)
            newer.cancel()
            asked.cancel()

    async def _next_flip(self) -> None:
        self._flipped.clear()
        await self._flipped.wait()

    async def _ask(self, stream: str, lineage: int, held: int) -> None:
        most = 1 + self.world.rng.randrange(3)
        try:
            leases = await self._client.lease(stream, held=held, lineage=lineage, most=most, wait_s=PARK_S)
        except RefusedError as refusal:
            if refusal.reason == "unopened":
                await asyncio.sleep(1.0)
            elif refusal.reason == "lineage":
                while self.policy <= (lineage, held):
                    await self._next_flip()
            else:
                raise
            return
        for lease in leases:
            key = (stream, lease.task.ordinal, lease.epoch)
            self._working[key] = self.start(self._work(stream, lease))

    async def _work(self, stream: str, lease: Lease) -> None:
        ordinal, plan, rng = lease.task.ordinal, self.world.plan, self.world.rng
        if stream == TRAIN:
            self.world.history.check_handed_on(lease)
        tokens: list[Policy] = [tuple(pair) for frame in lease.progress for pair in msgpack.unpackb(frame)]
        try:
            if stream == TRAIN and ordinal in plan.bad:
                await self._client.drop(stream, lease, "reward")
                return
            for part in range(2):
                tokens.append(self.policy)
                await self._compute(plan.generation_s * rng.expovariate(2.0))
                if part == 0 and rng.random() < plan.progress:
                    await self._client.progress(stream, lease, [msgpack.packb(tokens)])
            if rng.random() < 0.03:
                await self._client.give_back(stream, [lease])
                return
            if stream == TRAIN:
                self.world.history.made[ordinal, lease.epoch] = tokens
            await self._client.commit(stream, lease, group_of(lease.task, tokens))
        except RefusedError as refusal:
            if refusal.reason not in ("fenced", "stale"):
                raise
        finally:
            self._working.pop((stream, ordinal, lease.epoch), None)

    async def _compute(self, seconds: float) -> None:
        """A machine that is frozen does nothing, and finds that time has passed."""
        await asyncio.sleep(seconds)
        while self.frozen_until > self.world.loop.time():
            await asyncio.sleep(self.frozen_until - self.world.loop.time())

    async def _renew(self) -> None:
        while True:
            renewal = await self._client.renew({"held": self.policy[1]})
            if renewal.closed:
                return
            for key in renewal.lost:
                if key in self._working:
                    self._working[key].cancel()
            await self._compute(HEARTBEAT_S)


class Scorer(Process):
    async def run(self) -> None:
        client, rng = self.client(self.name), self.world.rng
        stages = self.world.plan.stream.stages
        stage = stages[int(self.name[-1]) % len(stages)]
        await client.connect()
        self.start(self._renew(client))
        while True:
            try:
                for lease in await client.stage_lease(TRAIN, stage.name, most=2, wait_s=PARK_S):
                    await asyncio.sleep(rng.expovariate(2.0))
                    if rng.random() < 0.03:
                        await client.stage_drop(TRAIN, lease, "unscored")
                    elif rng.random() < 0.03:
                        await client.give_back(TRAIN, [lease])
                    else:
                        assert set(lease.group.columns) >= set(stage.needs)
                        score = np.full(lease.group.tokens, lease.group.task.ordinal, np.float32)
                        await client.stage_commit(TRAIN, lease, dict.fromkeys(stage.adds, score))
            except RefusedError as refusal:
                if refusal.reason not in ("fenced", "unopened"):
                    raise
                await asyncio.sleep(0.5)

    async def _renew(self, client: QueueClient) -> None:
        while not (await client.renew()).closed:
            await asyncio.sleep(HEARTBEAT_S)


class Operator(Process):
    """Drains the run."""

    async def run(self) -> None:
        client = self.client(self.name)
        with suppress(RefusedError):  # not opened yet
            await client.connect()
            await client.drain(TRAIN)


def group_of(task: Task, tokens: Sequence[Policy]) -> Group:
    """Tokens that say which policy made them."""
    rollout = Rollout(
        token_ids=np.array([lineage for lineage, _ in tokens], np.int64),
        loss_mask=np.ones(len(tokens), np.int8),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.array([version for _, version in tokens], np.int32),
        finish="stop",
    )
    return Group.from_rollouts(task, Sampling(), [rollout])
