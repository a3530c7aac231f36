"""This queue as a run uses it: lease ─▸ commit ─▸ claim ─▸ trained, all through `QueueClient`.

options: keys of the configuration's section `queue`; redis: start one for it; curve: with keys
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.schema import QueueConfig
from asyncrl.errors import SourceEndedError
from asyncrl.queue.client.client import QueueClient
from asyncrl.queue.feeder import feed
from asyncrl.queue.protocol.replies import Claim, Lease
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.rpc.keys import client_keys, make_keys
from asyncrl.types import Finish, Group, Sampling, Task
from bench.broker import serving
from bench.queue.endpoint import Run
from bench.queue.load import AHEAD, DEPTH, IN_FLIGHT, POOL, ROWS, Arrays, Columns, Load
from bench.queue.redis_server import redis_server

RUN, STREAM = "bench", "train"
STEP = 64
"""Groups of a version."""

CHECKPOINT_EVERY = 4
MICRO_BATCH = STEP // 2
"""Groups that a claim may bring."""

TURNS = 3
"""Of the event loop, until what a new task asks for is sent."""

FEW = 8
"""Tasks that a generator at low load leases at once."""

WAIT_S = 30.0
PROMPT = "What is the sum of all prime numbers below two thousand? Think step by step. " * 2


def settings(learners: int = 1) -> StreamSettings:
    """Depth, and not staleness, is what holds the producer back, as it does in the other systems."""
    return StreamSettings(
        groups_per_version=STEP,
        max_staleness=4,
        window=DEPTH - STEP + 1,
        depth=DEPTH,
        max_bytes=4 << 30,
        lease_s=30.0,
        learners=learners,
    )


@contextmanager
def serve(folder: Path, options: Mapping[str, Any], load: Load) -> Iterator[list[str | None]]:
    keys, words = None, dict(options)
    with ExitStack() as stack:
        if words.pop("curve", False):
            keys = str(folder / "keys")
            make_keys(Path(keys))
        if words.pop("redis", False):
            words["redis_url"] = "unix://" + stack.enter_context(redis_server(folder))
        address = [stack.enter_context(serving(QueueConfig(**words), RUN, folder / "queue", keys)), keys]
        threading.Thread(target=lambda: asyncio.run(_feed(address, load)), daemon=True).start()
        yield address


def produce(address: list[str | None], run: Run) -> None:
    asyncio.run(_produce(address, run))


def consume(address: list[str | None], run: Run) -> None:
    asyncio.run(_consume(address, run))


async def _produce(address: list[str | None], run: Run) -> None:
    client = _client(address, "producer")
    await client.connect()
    made = [group_of(Task(i, ""), run.columns(i)) for i in range(POOL)]
    run.start()
    room, committing, leased = asyncio.Semaphore(IN_FLIGHT), set(), 0
    most = FEW if run.load.pace_s else IN_FLIGHT

    async def commit(lease: Lease) -> None:
        ordinal = lease.task.ordinal
        group = replace(made[ordinal % POOL], task=lease.task)
        run.sends(ordinal)
        await client.commit(STREAM, lease, group)
        room.release()

    while leased < run.load.groups:
        leases = await client.lease(STREAM, held=AHEAD, lineage=0, most=most, wait_s=WAIT_S)
        for lease in leases:
            await room.acquire()
            if pause_s := run.pause_s(leased):
                await asyncio.sleep(pause_s)
            task = asyncio.create_task(commit(lease))
            committing.add(task)
            task.add_done_callback(committing.discard)
            leased += 1
    await asyncio.gather(*committing)
    await client.close()


async def _consume(address: list[str | None], run: Run) -> None:
    """As a learner does it, the next claim is under way while the last one is worked on; here also that of the next
    step, while the queue hears that this one is trained."""
    client = _client(address, "consumer")
    await client.connect()
    opened = await client.open(STREAM, settings())
    run.start()
    epoch, step, index = opened.learner_epoch, 0, 0

    def claim(step: int, index: int) -> asyncio.Task[Claim | None]:
        max_tokens = MICRO_BATCH * ROWS * run.load.tokens
        at: dict[str, Any] = {"learner_epoch": epoch, "step": step, "index": index, "rank": 0}
        asking = client.claim(STREAM, **at, max_tokens=max_tokens, whole=False, wait_s=WAIT_S)
        return asyncio.create_task(asking)

    asked = claim(step, index)
    while len(run.times) < run.load.groups:
        claimed, there = await asked, time.monotonic()
        assert claimed is not None, f"no group for {WAIT_S} s"
        if not claimed.last:
            index += 1
            asked = claim(step, index)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        for group in claimed.groups:
            run.got(group.task.ordinal, columns_of(group), there)
        if claimed.last:
            trained = client.trained(STREAM, learner_epoch=epoch, step=step)
            step, index = step + 1, 0
            asked = claim(step, index)
            await trained
            if step % CHECKPOINT_EVERY == 0:
                await client.checkpointed(STREAM, learner_epoch=epoch, version=step)
    asked.cancel()
    await client.close()


async def _feed(address: list[str | None], load: Load) -> None:
    def task_at(ordinal: int) -> Task:
        if ordinal >= load.groups:
            raise SourceEndedError("that is all")
        return Task(ordinal, PROMPT, {"answer": str(ordinal)})

    client = _client(address, "feeder")
    await client.connect()
    await feed(client, STREAM, task_at)


def _client(address: list[str | None], who: str) -> QueueClient:
    place, keys = address
    assert place is not None
    return QueueClient(place, run=RUN, who=who, keys=client_keys(keys))


def group_of(task: Task, columns: Arrays) -> Group:
    flat = {name: np.reshape(column, -1) for name, column in columns.items()}
    finish: list[Finish] = ["stop"] * ROWS
    return Group(
        task=task,
        token_ids=flat["token_ids"],
        logprobs=flat["logprobs"],
        loss_mask=flat["loss_mask"],
        versions=flat["versions"],
        lengths=np.full(ROWS, len(columns["token_ids"][0]), np.int64),
        rewards=np.ones(ROWS, np.float32),
        sampling=Sampling(),
        finish=tuple(finish),
    )


def columns_of(group: Group) -> Columns:
    names = ("token_ids", "logprobs", "loss_mask", "versions")
    return {name: getattr(group, name).reshape(len(group.lengths), -1) for name in names}
