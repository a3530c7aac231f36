"""Brokers killed at random moments under load: whatever they keep, and where, every ordinal ends once.

Feeder, workers and learner are real clients in this process. A kill comes after so many of their requests, wherever
these happen to be then.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from queue_cases import group
from redis_server import RedisServer

from asyncrl.errors import JournalError, RefusedError, SourceEndedError
from asyncrl.queue.client.client import QueueClient
from asyncrl.queue.feeder import feed
from asyncrl.queue.protocol.replies import Claim
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.system.signals import die_with_parent
from asyncrl.types import Task

T = TypeVar("T")

TASKS = 60
B = 4
TRAIN = StreamSettings(
    groups_per_version=B,
    max_staleness=2,
    window=B + 1,
    depth=4 * B,
    max_bytes=1 << 30,
    lease_s=2.0,
    learners=2,
)
KILLS = 3
WAIT_S = 60.0
DROPPED = {7, 8, 30}
"""Tasks that no worker can do."""

KINDS = {
    "metadata": ("store=file",),
    "payload": ("store=file", "durable=payload"),
    "redis": ("store=redis",),
    "redis-payload": ("store=redis", "durable=payload"),
}


class BrokerProcess:
    def __init__(self, folder: Path, words: list[str]) -> None:
        self._folder, self._words = folder, words
        self.address = "tcp://127.0.0.1:*"
        self.start()

    def start(self) -> None:
        program = [sys.executable, str(Path(__file__).with_name("broker_process.py"))]
        words = [*program, self.address, str(self._folder), *self._words]
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, self.process.communicate()[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=KINDS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerProcess]:
    words = list(KINDS[request.param])
    if "redis" in request.param:
        server: RedisServer = request.getfixturevalue("redis_server")
        words.append(f"redis_url={server.url}")
    broker = BrokerProcess(tmp_path, words)
    yield broker
    broker.kill()


class Load:
    """Everybody who works with the queue, and what they have seen.

    trained: ordinals of each step that was reported as trained
    """

    def __init__(self, broker: BrokerProcess, seed: int) -> None:
        rng = random.Random(seed)
        self._broker = broker
        self._kills = sorted(rng.sample(range(5, 2 * TASKS), KILLS))
        self._requests = 0
        self.trained: dict[int, list[int]] = {}

    async def run(self) -> dict[str, int]:
        """Until there are no tasks any more. Returns the queue's counts."""
        clients = [self._client(who) for who in ("feeder", "w0", "w1", "learner")]
        feeder, w0, w1, learner = clients
        try:
            async with asyncio.timeout(WAIT_S):
                for client in clients:
                    await client.connect()
                await self._learner_opens(learner)
                async with asyncio.TaskGroup() as group:
                    others = [group.create_task(work) for work in self._others(feeder, w0, w1)]
                    await self._learn(learner)
                    for other in others:
                        other.cancel()
                counts = (await learner.status())["streams"]["train"]
        finally:
            for client in clients:
                await client.close()
        assert self._requests > self._kills[-1], "the run was over before the last kill"
        return counts

    def _client(self, who: str) -> QueueClient:
        return QueueClient(self._broker.address, run="run", who=who, deadline_s=WAIT_S)

    async def _asked(self, request: Awaitable[T]) -> T:
        """The answer. Now and then the broker dies while the request is on its way."""
        asked = asyncio.ensure_future(request)
        self._requests += 1
        if self._requests in self._kills:
            await asyncio.sleep(0)  # it is sent, maybe
            self._broker.kill()
            await asyncio.to_thread(self._broker.start)
        return await asked

    def _others(self, feeder: QueueClient, *workers: QueueClient) -> list[Awaitable[None]]:
        def task_at(ordinal: int) -> Task:
            if ordinal >= TASKS:
                raise SourceEndedError
            return Task(ordinal, f"{ordinal}+1=")

        return [
            feed(feeder, "train", task_at),
            *(self._work(worker) for worker in workers),
            *(_renew(worker) for worker in workers),
        ]

    async def _work(self, worker: QueueClient) -> None:
        """Holds the version that is trained."""
        while True:
            held = max(self.trained, default=-1) + 1
            leases = await self._asked(worker.lease("train", held=held, lineage=0, most=3, wait_s=0.2))
            for lease in leases:
                try:
                    if lease.task.ordinal in DROPPED:
                        await self._asked(worker.drop("train", lease, "reward"))
                    else:
                        await self._asked(worker.commit("train", lease, group(lease.task, held, length=2)))
                except RefusedError as refusal:
                    if refusal.reason != "fenced":
                        raise

    async def _learner_opens(self, learner: QueueClient) -> None:
        opened = await self._asked(learner.open("train", TRAIN))
        self._epoch = opened.learner_epoch

    async def _learn(self, learner: QueueClient) -> None:
        step = 0
        while True:
            try:
                ordinals = await self._step(learner, step)
            except RefusedError as refusal:
                if refusal.reason == "abandoned":
                    continue
                if refusal.reason == "exhausted":
                    return
                raise
            trained = await self._asked(learner.trained("train", learner_epoch=self._epoch, step=step))
            step = trained.version
            self.trained[step - 1] = ordinals

    async def _step(self, learner: QueueClient, step: int) -> list[int]:
        """Both ranks' groups."""
        ordinals: list[int] = []
        index, last = 0, False
        attempt: int | None = None
        while not last:
            for rank in range(2):
                claim = await self._claim(learner, step, index, rank, attempt)
                ordinals += [group.task.ordinal for group in claim.groups]
                attempt, last = claim.attempt, claim.last
            index += 1
        return ordinals

    async def _claim(
        self, learner: QueueClient, step: int, index: int, rank: int, attempt: int | None
    ) -> Claim:
        where = {"learner_epoch": self._epoch, "step": step, "index": index, "rank": rank, "attempt": attempt}
        while True:
            asked = learner.claim("train", **where, max_tokens=100, whole=False, wait_s=0.2)
            claim = await self._asked(asked)
            if claim is not None:
                return claim


async def _renew(worker: QueueClient) -> None:
    while True:
        await worker.renew()
        await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_every_ordinal_ends_once_however_often_the_broker_dies(
    broker: BrokerProcess, seed: int
) -> None:
    load = Load(broker, seed)
    counts = await load.run()
    ended = Counter(ordinal for ordinals in load.trained.values() for ordinal in ordinals)
    assert set(ended.values()) == {1}
    assert set(ended) == set(range(TASKS)) - DROPPED
    assert (counts["trained"], counts["dropped_by_reason"]) == (
        TASKS - len(DROPPED),
        {"reward": len(DROPPED)},
    )
    assert sorted(load.trained) == list(range(counts["version"]))


async def test_a_second_broker_is_kept_out_or_takes_over(broker: BrokerProcess, tmp_path: Path) -> None:
    client = QueueClient(broker.address, run="run", who="learner", deadline_s=WAIT_S)
    await client.connect()
    await client.open("train", TRAIN)
    if "store=file" in broker._words:
        with pytest.raises(AssertionError, match="another broker"):
            BrokerProcess(tmp_path, broker._words)
    else:
        second = BrokerProcess(tmp_path, broker._words)
        status = await _status(second.address)
        assert status["streams"]["train"]["learner_epoch"] == 1
        waits = asyncio.ensure_future(client.post("key", 1))  # what the first cannot write it does not answer
        _, printed = await asyncio.to_thread(broker.process.communicate)
        assert JournalError.__name__ in printed
        assert "has taken run run over" in printed
        assert not waits.done()
        waits.cancel()
        second.kill()
    await client.close()


async def _status(address: str) -> dict[str, dict[str, dict[str, int]]]:
    client = QueueClient(address, run="run", who="operator", deadline_s=WAIT_S)
    await client.connect()
    status = await client.status()
    await client.close()
    return status
