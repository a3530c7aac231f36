"""A client shows the wait for a queue that is gone, and its end."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

from queue_cases import serving
from waiting import eventually

from asyncrl.queue.broker.broker import Broker
from asyncrl.queue.client.client import QueueClient
from asyncrl.telemetry.status import ProcessStatus

DEADLINE_S = 30.0


class Queue:
    """A broker that can be started again at its address."""

    def __init__(self) -> None:
        broker = Broker("tcp://127.0.0.1:*", "run")
        self.address = broker.bound_address
        broker.close()

    def start(self) -> None:
        self._end = ExitStack()
        self._end.enter_context(serving(Broker(self.address, "run")))

    def stop(self) -> None:
        self._end.close()


async def test_the_wait_for_a_queue_that_is_gone_is_shown_until_it_is_back() -> None:
    queue, status = Queue(), ProcessStatus()
    client = QueueClient(queue.address, run="run", who="me", deadline_s=DEADLINE_S, status=status)
    began = time.monotonic()
    connecting = asyncio.create_task(client.connect())
    await eventually(lambda: status.waits(0.0))
    (wait,) = status.waits(0.0)
    assert wait.whom == f"the queue at {queue.address}"
    assert wait.until is not None
    assert began <= wait.until - DEADLINE_S <= time.monotonic()
    queue.start()
    await connecting
    assert status.waits(0.0) == []
    queue.stop()
    await eventually(lambda: status.waits(0.0))
    assert status.waits(0.0)[0].until is None  # nothing is asked, so nothing gives up
    renewing = asyncio.create_task(client.renew())
    await eventually(lambda: status.waits(0.0)[0].until is not None)
    queue.start()
    await renewing
    assert status.waits(0.0) == []
    await client.close()
    queue.stop()


async def test_a_client_that_is_closed_waits_for_nobody() -> None:
    queue, status = Queue(), ProcessStatus()
    client = QueueClient(queue.address, run="run", who="me", deadline_s=0.05, status=status)
    connecting = asyncio.create_task(client.connect())
    await eventually(lambda: status.waits(0.0))
    await client.close()
    assert status.waits(0.0) == []
    await asyncio.gather(connecting, return_exceptions=True)
