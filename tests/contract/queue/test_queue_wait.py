"""A client shows the wait for a queue that is gone, and its end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from asyncrl.queue.broker.broker import Broker
from asyncrl.queue.client.client import QueueClient
from asyncrl.telemetry.status import ProcessStatus

PATIENCE_S = 20.0
DEADLINE_S = 30.0


class Queue:
    """A broker that can be started again at its address."""

    def __init__(self) -> None:
        broker = Broker("tcp://127.0.0.1:*", "run")
        self.address = broker.bound_address
        broker.close()

    def start(self) -> None:
        self._broker = Broker(self.address, "run")
        self._thread = threading.Thread(target=self._broker.serve)
        self._thread.start()

    def stop(self) -> None:
        self._broker.stop()
        self._thread.join(PATIENCE_S)


async def until(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not look():
            await asyncio.sleep(0.005)


async def test_the_wait_for_a_queue_that_is_gone_is_shown_until_it_is_back() -> None:
    queue, status = Queue(), ProcessStatus()
    client = QueueClient(queue.address, run="run", who="me", deadline_s=DEADLINE_S, status=status)
    connecting = asyncio.create_task(client.connect())
    await until(lambda: bool(status.waits(0.0)))
    (wait,) = status.waits(0.0)
    assert wait.whom == f"the queue at {queue.address}"
    assert wait.until is not None
    assert 0 < wait.until - time.monotonic() <= DEADLINE_S
    queue.start()
    await connecting
    assert status.waits(0.0) == []
    queue.stop()
    await until(lambda: bool(status.waits(0.0)))
    assert status.waits(0.0)[0].until is None  # nothing is asked, so nothing gives up
    renewing = asyncio.create_task(client.renew())
    await until(lambda: status.waits(0.0)[0].until is not None)
    queue.start()
    await renewing
    assert status.waits(0.0) == []
    await client.close()
    queue.stop()


async def test_a_client_that_is_closed_waits_for_nobody() -> None:
    queue, status = Queue(), ProcessStatus()
    client = QueueClient(queue.address, run="run", who="me", deadline_s=0.05, status=status)
    connecting = asyncio.create_task(client.connect())
    await until(lambda: bool(status.waits(0.0)))
    await client.close()
    assert status.waits(0.0) == []
    await asyncio.gather(connecting, return_exceptions=True)
