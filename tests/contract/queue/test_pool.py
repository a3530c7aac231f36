"""The worker of a pool against a queue: what it adds, what it leaves out, how it ends."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import pytest
from queue_cases import LEASE_S, WAIT_S, AnyQueue, B, claim, group, lease, ordinals, tasks

from asyncrl.config.config_consistency import AGREED, agreed
from asyncrl.config.schema import Config, GeneratorConfig, LearnerConfig, RunConfig
from asyncrl.config.sections.placement import PlaceConfig, PlacementConfig
from asyncrl.errors import ConfigError, DeadlineError
from asyncrl.pool.worker import AddColumns, LeftOut, PoolWorker
from asyncrl.queue.client.client import QueueClient
from asyncrl.queue.protocol.settings import StageSettings, StreamSettings
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import NO_VERSION, Array, Group

SETTINGS = StreamSettings(
    groups_per_version=B,
    max_staleness=1,
    window=1,
    depth=2 * B,
    max_bytes=1 << 30,
    lease_s=LEASE_S,
    columns=("reference",),
    stages=(StageSettings("reference", adds=("reference",)),),
)


class Says:
    """Of each token its ordinal, once `at` lets it; work on what `at` raises for ends so."""

    concurrency = 1

    def __init__(self, at: Callable[[int], Awaitable[None]] | None = None) -> None:
        self._at, self.began = at, asyncio.Event()

    @property
    def streams(self) -> Mapping[str, AddColumns]:
        return {"train": self.columns}

    def stats(self) -> Mapping[str, float]:
        return {"own": 7.0}

    async def ready(self) -> None:
        """At once."""

    def check(self) -> None:
        """Nothing."""

    async def columns(self, group: Group) -> Mapping[str, Array]:
        self.began.set()
        if self._at is not None:
            await self._at(group.task.ordinal)
        return {"reference": np.full(group.tokens, group.task.ordinal, np.float32)}


def config_with(deadline_s: float = WAIT_S, learner_s: float = WAIT_S) -> Config:
    place = PlaceConfig(where="pool", deadline_s=deadline_s)
    return Config(
        placement=PlacementConfig(reference=place),
        generator=GeneratorConfig(heartbeat_s=0.01),
        learner=LearnerConfig(groups_deadline_s=learner_s),
    )


def worker(client: QueueClient, work: Any, **config: float) -> PoolWorker:
    return PoolWorker("reference-0", "reference", work, client, config_with(**config), ProcessStatus())


async def committed(queue: AnyQueue, count: int = B) -> tuple[QueueClient, Any]:
    """(the learner's client, what it opened), with so many groups that wait for the stage."""
    learner, generator = await queue.client("learner"), await queue.client("generator")
    opened = await learner.open("train", SETTINGS)
    await learner.post(AGREED, agreed(config_with()))
    await learner.submit("train", tasks(0, count))
    for one in await lease(generator, count):
        await generator.commit("train", one, group(one.task, 0))
    return learner, opened


async def ended(running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(WAIT_S):
        await running


async def test_groups_come_to_the_learner_with_what_the_pool_says_and_the_pool_ends_with_the_run(
    queue: AnyQueue,
) -> None:
    pool = worker(await queue.client("reference-0"), Says())
    running = asyncio.create_task(pool.run())  # before the learner has opened the stream
    learner, opened = await committed(queue)
    claimed = await claim(learner, opened, 0)
    assert ordinals(claimed.groups) == [0, 1, 2, 3]
    for one, stamps in zip(claimed.groups, claimed.stamps, strict=True):
        assert one.columns["reference"].tolist() == [one.task.ordinal] * one.tokens
        assert stamps == {"reference": NO_VERSION}
    await learner.finish("done")
    await ended(running)
    stats = pool.stats()
    assert (stats["stage"], stats["groups"], stats["own"]) == ("reference", B, 7.0)


async def test_what_a_pool_leaves_out_is_dropped_by_name(queue: AnyQueue) -> None:
    async def refuse_the_second(ordinal: int) -> None:
        if ordinal == 1:
            raise LeftOut("not_finite", "it is no number")

    pool = worker(await queue.client("reference-0"), Says(refuse_the_second))
    running = asyncio.create_task(pool.run())
    learner, opened = await committed(queue, B + 1)
    assert ordinals((await claim(learner, opened, 0)).groups) == [0, 2, 3, 4]
    assert (await learner.status())["streams"]["train"]["dropped_by_reason"] == {"not_finite": 1}
    assert pool.stats()["dropped/not_finite"] == 1
    await learner.finish("done")
    await ended(running)


async def test_another_process_does_what_a_dead_one_held(queue: AnyQueue) -> None:
    """It is silent for longer than a lease, and what it says then is refused."""
    stalled = asyncio.Event()

    async def stall(ordinal: int) -> None:
        await stalled.wait()

    slow = Says(stall)
    dead = worker(await queue.client("reference-0"), slow)
    tasks = [
        asyncio.create_task(dead._work_on("train", slow.columns)) for _ in range(2)
    ]  # without its heartbeat
    learner, opened = await committed(queue)
    async with asyncio.timeout(WAIT_S):
        await slow.began.wait()
    heir = asyncio.create_task(worker(await queue.client("reference-1"), Says()).run())
    queue.clock.now = LEASE_S + 1
    assert ordinals((await claim(learner, opened, 0)).groups) == [0, 1, 2, 3]
    stalled.set()
    async with asyncio.timeout(WAIT_S):
        while not dead.stats().get("refused/fenced"):
            await learner.status()
    await learner.finish("done")
    await ended(heir)
    for hand in tasks:
        hand.cancel()
    await asyncio.wait(tasks)


async def test_work_that_takes_too_long_ends_the_process_by_name(queue: AnyQueue) -> None:
    async def for_ever(ordinal: int) -> None:
        await asyncio.Event().wait()

    await committed(queue, 1)
    pool = worker(await queue.client("reference-0"), Says(for_ever), deadline_s=0.05)
    with pytest.raises(
        DeadlineError, match=r"reference-0 waited .* stage 'reference': the columns of task 0"
    ):
        await pool.run()


async def test_a_learner_that_never_opens_the_stage_is_not_waited_for_forever(queue: AnyQueue) -> None:
    learner = await queue.client("learner")
    await learner.open("train", dataclasses.replace(SETTINGS, columns=(), stages=()))
    await learner.post(AGREED, agreed(config_with()))
    pool = worker(await queue.client("reference-0"), Says(), learner_s=0.01)
    with pytest.raises(DeadlineError, match="for the learner: a stream with the stage 'reference'"):
        await pool.run()


async def test_a_pool_of_another_configuration_leases_nothing(queue: AnyQueue) -> None:
    client, work = await queue.client("reference-0"), Says()
    other = dataclasses.replace(config_with(), run=RunConfig(seed=1))
    running = asyncio.create_task(
        PoolWorker("reference-0", "reference", work, client, other, ProcessStatus()).run()
    )
    await committed(queue)
    with pytest.raises(ConfigError, match=r"run\.seed is 0 at the learner and 1 here"):
        await ended(running)
    assert not work.began.is_set()


async def test_a_pool_ends_where_the_learner_comes_back_with_another_configuration(queue: AnyQueue) -> None:
    client, work = await queue.client("reference-0"), Says()
    running = asyncio.create_task(worker(client, work).run())
    learner, _ = await committed(queue)
    async with asyncio.timeout(WAIT_S):
        await work.began.wait()
    await learner.post(AGREED, agreed(dataclasses.replace(config_with(), run=RunConfig(seed=1))))
    with pytest.raises(ConfigError, match=r"run\.seed"):
        await ended(running)


async def test_a_cancelled_pool_gives_back_what_it_holds(queue: AnyQueue) -> None:
    async def for_ever(ordinal: int) -> None:
        await asyncio.Event().wait()

    client, work = await queue.client("reference-0"), Says(for_ever)
    running = asyncio.create_task(worker(client, work).run())
    learner, opened = await committed(queue)
    async with asyncio.timeout(WAIT_S):
        await work.began.wait()
    running.cancel()
    await asyncio.wait([running])
    await client.close()
    heir = asyncio.create_task(worker(await queue.client("reference-1"), Says()).run())
    assert ordinals((await claim(learner, opened, 0)).groups) == [0, 1, 2, 3]
    await learner.finish("done")
    await ended(heir)


async def test_the_trace_of_a_pool_has_its_groups_and_its_waits(queue: AnyQueue, trace: Any) -> None:
    pool = worker(await queue.client("reference-0"), Says())
    running = asyncio.create_task(pool.run())
    learner, opened = await committed(queue)
    await claim(learner, opened, 0)
    await learner.finish("done")
    await ended(running)
    lanes = trace().lanes
    groups = lanes["groups"].spans
    assert sorted(span.about["task"] for span in groups) == [0, 1, 2, 3]
    assert {span.name for span in groups} == {"reference"}
    assert "wait/groups" in {span.name for span in lanes["pool"].spans}
