"""`ray.util.queue.Queue`, which carries references to groups in Ray's object store."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.queue.endpoint import Run
from bench.queue.load import DEPTH, Load

NAME, SPACE = "groups", "bench"
IN_FLIGHT = 16
"""Puts and gets under way at once."""

STORE_BYTES = 2 << 30
ADDRESS, TOKEN = "RAY_ADDRESS", "RAY_AUTH_TOKEN"
PLAIN = {"RAY_AUTH_MODE": "token", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """A Ray of one machine, with a token of its own: what a process needs in its environment to join it."""
    found = {**PLAIN, TOKEN: secrets.token_hex(32)}
    os.environ.update(found)
    import ray

    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
        namespace=SPACE,
    )
    try:
        yield {**found, ADDRESS: ray.get_runtime_context().gcs_address}
    finally:
        ray.shutdown()


def join(address: Mapping[str, str]) -> Any:
    """This process becomes a driver of that cluster. The module ray."""
    os.environ.update(address)
    import ray

    ray.init(namespace=SPACE, log_to_driver=False)
    return ray


@contextmanager
def serve(folder: Path, options: Mapping[str, Any], load: Load) -> Iterator[dict[str, str]]:
    with cluster() as address:
        from ray.util.queue import Queue

        queue = Queue(maxsize=DEPTH, actor_options={"num_cpus": 0, "name": NAME})
        yield address
        queue.shutdown(force=True)


def produce(address: dict[str, str], run: Run) -> None:
    ray = join(address)
    actor = ray.get_actor(NAME)
    asyncio.run(_produce(run, lambda i: actor.put.remote((i, [ray.put(dict(run.columns(i)))]))))


def consume(address: dict[str, str], run: Run) -> None:
    ray = join(address)
    actor = ray.get_actor(NAME)
    asyncio.run(_consume(run, actor.get.remote, ray.get))


async def _produce(run: Run, put: Any) -> None:
    run.start()
    room = asyncio.Semaphore(IN_FLIGHT)

    async def send(i: int) -> None:
        run.sends(i)
        await put(i)
        room.release()

    async with asyncio.TaskGroup() as sending:
        for i in range(run.load.groups):
            await room.acquire()
            await asyncio.sleep(run.pause_s(i))
            sending.create_task(send(i))


async def _consume(run: Run, get: Any, fetch: Any) -> None:
    run.start()
    left = iter(range(run.load.groups))

    async def take() -> None:
        for _ in left:
            i, (reference,) = await get()
            run.got(i, fetch(reference))

    await asyncio.gather(*(take() for _ in range(IN_FLIGHT)))
