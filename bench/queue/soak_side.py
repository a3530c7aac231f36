"""A process of the soak: python -m bench.queue.soak_side ROLE, spoken to as in endpoint.py.

produce    many clients, each with one lease at a time       ◂── how many groups each has committed
consume    two learner ranks                                 ◂── what the queue says in the end
"""

from __future__ import annotations

import asyncio
import resource
import sys
from typing import Any

from asyncrl.errors import RunClosedError
from asyncrl.queue.client.client import QueueClient
from asyncrl.queue.protocol.settings import StreamSettings
from bench.process import Talk
from bench.queue.asyncrl_queue import MICRO_BATCH, RUN, STREAM, columns_of, group_of
from bench.queue.load import AHEAD, ROWS, Load, Source, check

STEP, RANKS, CHECKPOINT_EVERY = 256, 2, 2
WAIT_S = 60.0
DEADLINE_S = 300.0


def settings() -> StreamSettings:
    """η = 3."""
    return StreamSettings(
        groups_per_version=STEP,
        max_staleness=3,
        window=STEP + 1,
        depth=4 * STEP,
        max_bytes=4 << 30,
        lease_s=DEADLINE_S,
        learners=RANKS,
    )


def main(role: str) -> None:
    talk = Talk()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    said = talk.hears()
    asyncio.run((_produce if role == "produce" else _consume)(said, talk))
    sys.stdin.read()


async def _produce(said: dict[str, Any], talk: Talk) -> None:
    source = Source(Load(**said["load"]))
    clients = [_client(said, f"generator-{said['process']}-{i}") for i in range(said["clients"])]
    for client in clients:
        await client.connect()
    talk.tell("ready")
    talk.hears()

    async def work(client: QueueClient) -> int:
        committed = 0
        while True:
            try:
                leases = await client.lease(STREAM, held=AHEAD, lineage=0, most=1, wait_s=WAIT_S)
                for lease in leases:
                    group = group_of(lease.task, source.columns(lease.task.ordinal))
                    await client.commit(STREAM, lease, group)
                    committed += 1
            except RunClosedError:
                return committed

    talk.tell(await asyncio.gather(*(work(client) for client in clients)))


async def _consume(said: dict[str, Any], talk: Talk) -> None:
    load = Load(**said["load"])
    ranks = [_client(said, f"learner-{rank}") for rank in range(RANKS)]
    for client in ranks:
        await client.connect()
    first = ranks[0]
    epoch = (await first.open(STREAM, settings())).learner_epoch
    talk.tell("ready")
    talk.hears()
    seen: set[int] = set()
    step = 0
    while len(seen) < load.groups:
        for ordinals in await asyncio.gather(
            *(_share(client, rank, epoch, step, load) for rank, client in enumerate(ranks))
        ):
            assert seen.isdisjoint(ordinals), f"came twice: {seen & ordinals}"
            seen |= ordinals
        await first.trained(STREAM, learner_epoch=epoch, step=step)
        step += 1
        if step % CHECKPOINT_EVERY == 0:
            await first.checkpointed(STREAM, learner_epoch=epoch, version=step)
    assert seen == set(range(load.groups))
    status = await first.status()
    counts = status["streams"][STREAM]
    assert counts["trained"] == load.groups, counts
    await first.finish("all groups are there")
    talk.tell({"clients": status["clients"], "dropped": counts["dropped"]})


async def _share(client: QueueClient, rank: int, epoch: int, step: int, load: Load) -> set[int]:
    """The ordinals of a rank's groups of a step."""
    ordinals: set[int] = set()
    index, last = 0, False
    while not last:
        claim = await client.claim(
            STREAM,
            learner_epoch=epoch,
            step=step,
            index=index,
            rank=rank,
            max_tokens=MICRO_BATCH * ROWS * load.tokens,
            whole=False,
            wait_s=WAIT_S,
        )
        assert claim is not None, f"no group for {WAIT_S} s"
        for group in claim.groups:
            check(load, group.task.ordinal, columns_of(group))
            assert group.task.ordinal not in ordinals, group.task.ordinal
            ordinals.add(group.task.ordinal)
        index, last = index + 1, claim.last
    return ordinals


def _client(said: dict[str, Any], who: str) -> QueueClient:
    return QueueClient(said["address"], run=RUN, who=who, deadline_s=DEADLINE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
