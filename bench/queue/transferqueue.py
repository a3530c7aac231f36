"""TransferQueue's key-value interface. Its consumer learns of keys through a socket that costs next to nothing.

producer ── kv_batch_put ──▸ TransferQueue ── kv_batch_get, kv_clear ──▸ consumer
         ── a byte for each group that is there ──▸   ◂── and for each that was taken
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.queue.endpoint import Run
from bench.queue.load import DEPTH, ROWS, Load
from bench.queue.ray_queue import cluster, join

PARTITION = "train"
NUMBER = struct.Struct("<I")
IN_FLIGHT = 8
"""Puts and gets under way at once."""

CLEAR_EVERY = 16
"""Groups that are cleared together."""

QUIET = {"TQ_LOGGING_LEVEL": "ERROR"}


@contextmanager
def serve(folder: Path, options: Mapping[str, Any], load: Load) -> Iterator[dict[str, Any]]:
    os.environ.update(QUIET)
    with cluster() as address:
        import transfer_queue

        transfer_queue.init()
        yield {"cluster": address, "socket": str(folder / "keys.socket")}
        transfer_queue.close()


def produce(address: dict[str, Any], run: Run) -> None:
    asyncio.run(_produce(_join(address), address["socket"], run))


def consume(address: dict[str, Any], run: Run) -> None:
    asyncio.run(_consume(_join(address), address["socket"], run))


async def _produce(queue: Any, path: str, run: Run) -> None:
    import torch
    from tensordict import TensorDict

    run.start()
    taken, news = await asyncio.open_unix_connection(path)
    room = asyncio.Semaphore(DEPTH)
    putting = asyncio.Semaphore(IN_FLIGHT)

    async def put(i: int) -> None:
        fields = {name: torch.from_numpy(column) for name, column in run.columns(i).items()}
        run.sends(i)
        await queue.async_kv_batch_put(_keys(i), PARTITION, TensorDict(fields, batch_size=ROWS))
        news.write(NUMBER.pack(i))
        putting.release()

    async def make_room() -> None:
        for _ in range(run.load.groups):
            await taken.readexactly(1)
            room.release()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(make_room())
        for i in range(run.load.groups):
            await room.acquire()
            await putting.acquire()
            await asyncio.sleep(run.pause_s(i))
            tasks.create_task(put(i))


async def _consume(queue: Any, path: str, run: Run) -> None:
    connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_unix_server(lambda *streams: connected.set_result(streams), path)
    run.start()
    there, news = await connected
    getting, uncleared = asyncio.Semaphore(IN_FLIGHT), []

    async def get(i: int) -> None:
        run.got(i, await queue.async_kv_batch_get(_keys(i), PARTITION))
        uncleared.extend(_keys(i))
        if len(uncleared) >= CLEAR_EVERY * ROWS:
            ended = uncleared[:]
            uncleared.clear()
            await queue.async_kv_clear(ended, PARTITION)
        news.write(b"x")
        getting.release()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(run.load.groups):
            await getting.acquire()
            (i,) = NUMBER.unpack(await there.readexactly(NUMBER.size))
            tasks.create_task(get(i))
    await news.drain()
    server.close()


def _keys(i: int) -> list[str]:
    return [f"{i}-{row}" for row in range(ROWS)]


def _join(address: dict[str, Any]) -> Any:
    os.environ.update(QUIET)
    join(address["cluster"])
    import transfer_queue

    transfer_queue.init()
    return transfer_queue
