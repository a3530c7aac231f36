"""The task feeder: keeps a stream supplied with tasks.

    queue ── room(next ordinal, how many) ──▸ feeder ── task_at(ordinal) … ──▸ submit ──▸ queue

The feeder waits only for the queue, which requests more tasks when at most half of its `depth` are pending.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from asyncrl.errors import RefusedError, RunClosedError, SourceEndedError
from asyncrl.queue.client.client import QueueClient
from asyncrl.types import Task

WAIT_S = 30.0
"""Duration of one long poll for room."""


async def feed(
    client: QueueClient,
    stream: str,
    task_at: Callable[[int], Task],
    before: Callable[[int], Awaitable[None]] | None = None,
) -> str:
    """Submit `task_at(ordinal)` for every ordinal that the stream has room for, until the run is over.

    Returns the reason that the learner gave for the end.

    `task_at` is pure, so a rewound stream gets the same tasks again; SourceEndedError means that there are no more,
    which is reported to the queue.

    before: awaited with the first ordinal that is not wanted yet, before any task below it is made
    """
    while True:
        try:
            first, count = await client.room(stream, WAIT_S)
            if before is not None:
                await before(first + count)
            tasks = _take(task_at, first, count)
            if tasks:
                await client.submit(stream, tasks)
            if len(tasks) < count:
                await client.exhaust(stream, first + len(tasks))
        except RunClosedError as closed:
            return str(closed)
        except RefusedError as refusal:
            # The stream was rewound between the two requests: begin again where it stands.
            if refusal.reason != "gap":
                raise


def _take(task_at: Callable[[int], Task], first: int, count: int) -> list[Task]:
    """Up to `count` tasks; fewer where the source ends."""
    tasks: list[Task] = []
    for ordinal in range(first, first + count):
        try:
            tasks.append(task_at(ordinal))
        except SourceEndedError:
            break
    return tasks
