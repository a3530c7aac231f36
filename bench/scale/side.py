"""The other side of the queue's process: python -m bench.scale.side ROLE, what it must know on stdin.

    heartbeats   clients with a lease each, which renew it again and again      ◂── how many requests there were
    claims       ranks whose claims bring nothing                               ◂── the same
    ranks        ranks that share the groups of a producer                      ◂── the same

Lines of JSON, as in bench/queue/endpoint.py: ◂── ready, go ──▸, and then the result.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.queue.client.client import QueueClient
from bench.process import Talk
from bench.queue.asyncrl_queue import MICRO_BATCH, RUN, STREAM, settings
from bench.queue.load import AHEAD, ROWS

WAIT_S = 30.0
STATS = {f"figure/{number}": number / 7 for number in range(40)}
"""About as many as a generator's heartbeat has."""

Side = Callable[[dict[str, Any], Talk], Awaitable[object]]


async def heartbeats(said: dict[str, Any], talk: Talk) -> int:
    learner = await _connected(said, "learner")
    await learner.open(STREAM, settings())
    clients = [await _connected(said, f"generator-{number}") for number in range(said["clients"])]
    for client in clients:
        assert await client.lease(STREAM, held=AHEAD, lineage=0, most=1, wait_s=WAIT_S)
    await _begin(talk)

    async def renew(client: QueueClient) -> None:
        for _ in range(said["each"]):
            await client.renew(STATS)

    await asyncio.gather(*map(renew, clients))
    return said["clients"] * said["each"]


async def claims(said: dict[str, Any], talk: Talk) -> int:
    """Nothing has been committed: each is answered after its wait of 0 s."""
    clients = [await _connected(said, f"learner-{rank}") for rank in range(said["clients"])]
    epoch = (await clients[0].open(STREAM, settings(said["clients"]))).learner_epoch
    await _begin(talk)

    async def claim(rank: int, client: QueueClient) -> None:
        for _ in range(said["each"]):
            at: dict[str, Any] = {"learner_epoch": epoch, "step": 0, "index": 0, "rank": rank}
            assert await client.claim(STREAM, **at, max_tokens=1, whole=False, wait_s=0.0) is None

    await asyncio.gather(*(claim(rank, client) for rank, client in enumerate(clients)))
    return said["clients"] * said["each"]


async def ranks(said: dict[str, Any], talk: Talk) -> int:
    """As many claims as the groups take."""
    clients = [await _connected(said, f"learner-{rank}") for rank in range(said["clients"])]
    epoch = (await clients[0].open(STREAM, settings(said["clients"]))).learner_epoch
    max_tokens = MICRO_BATCH * ROWS * said["tokens"] // said["clients"]
    await _begin(talk)
    seen = step = made = 0
    while seen < said["groups"]:
        index, last = 0, False
        while not last:
            at = {"learner_epoch": epoch, "step": step, "index": index, "max_tokens": max_tokens}
            asked = (
                client.claim(STREAM, **at, rank=rank, whole=False, wait_s=WAIT_S)
                for rank, client in enumerate(clients)
            )
            shares = [share for share in await asyncio.gather(*asked) if share is not None]
            assert len(shares) == len(clients), f"no group for {WAIT_S} s"
            seen += sum(len(share.groups) for share in shares)
            index, last, made = index + 1, shares[0].last, made + len(clients)
        await clients[0].trained(STREAM, learner_epoch=epoch, step=step)
        step += 1
        await clients[0].checkpointed(STREAM, learner_epoch=epoch, version=step)
    return made


async def _begin(talk: Talk) -> None:
    talk.tell("ready")
    await asyncio.to_thread(talk.hears)


async def _connected(said: dict[str, Any], who: str) -> QueueClient:
    client = QueueClient(said["address"][0], run=RUN, who=who)
    await client.connect()
    return client


def main(role: str) -> None:
    sides: dict[str, Side] = {"heartbeats": heartbeats, "claims": claims, "ranks": ranks}
    talk = Talk()
    said = talk.hears()
    talk.tell(asyncio.run(sides[role](said, talk)))  # type: ignore[arg-type]
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
