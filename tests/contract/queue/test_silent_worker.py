"""A worker that falls silent, its machine gone or its process killed, loses its leases after three heartbeats."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest
from dispatcher_cases import Network, lease_args, opened_desk
from queue_cases import TRAIN, WAIT_S, SocketQueue, lease, tasks

from asyncrl.config.schema import Config, GeneratorConfig, QueueConfig
from asyncrl.learner.startup import eval_settings, train_settings
from asyncrl.queue.ledger.events import Event, Leased, Renewed, Requeued
from asyncrl.queue.storage.records import Happened, Record
from asyncrl.system.signals import die_with_parent

LEASE_S = train_settings(Config(), data_world=1).lease_s
PATIENCE_S = 8.0
"""Longest wait of a learner for the tasks of a generator that died."""


@pytest.mark.parametrize(
    ("heartbeat_s", "lease_s", "silence_s"),
    [(2.0, None, 6.0), (0.2, None, 6.0), (5.0, None, 15.0), (2.0, 30.0, 30.0)],
)
def test_a_lease_lasts_three_heartbeats_unless_it_is_set(
    heartbeat_s: float, lease_s: float | None, silence_s: float
) -> None:
    config = Config(generator=GeneratorConfig(heartbeat_s=heartbeat_s), queue=QueueConfig(lease_s=lease_s))
    assert config.lease_s == silence_s
    assert train_settings(config, data_world=1).lease_s == silence_s
    assert eval_settings(config).lease_s == silence_s


def test_another_worker_gets_the_tasks_of_a_dead_one_within_the_patience_of_the_learner() -> None:
    """With the default configuration. The broker looks at its leases every 0.1 s."""
    net = Network(opened_desk(tasks=1, lease_s=LEASE_S))
    first = net.ask("dead", "lease", lease_args())
    net.deliver()
    ((ordinal, epoch, *_),) = net.value(first)
    renewed = {"leases": {"train": [[ordinal, epoch]]}, "stats": b"\x80"}
    for _ in range(10):
        net.deliver(GeneratorConfig().heartbeat_s / 2)
        net.deliver(GeneratorConfig().heartbeat_s / 2)
        beat = net.ask("dead", "renew", renewed)
        net.deliver()
        assert net.value(beat)["lost"] == []
    died = net.now
    second = net.ask("alive", "lease", lease_args(), wait_s=60.0)
    while second not in net.results:
        net.deliver(0.1)
        assert net.now - died <= PATIENCE_S
    assert [entry[0] for entry in net.value(second)] == [ordinal]


WORKER = """
import asyncio, sys
from asyncrl.queue.client.client import QueueClient

async def work(address):
    client = QueueClient(address, run="run", who="generator-0")
    await client.connect()
    await client.lease("train", held=0, lineage=0, most=1, wait_s=60.0)
    await client.renew()
    print("has renewed", flush=True)
    await asyncio.sleep(3600)

asyncio.run(work(sys.argv[1]))
"""


@pytest.mark.slow
async def test_the_task_of_a_killed_process_is_leased_again_when_three_heartbeats_are_missing() -> None:
    """By the times of the ledger's events."""
    events: list[Event] = []

    def note(record: Record) -> None:
        if isinstance(record, Happened):
            events.append(record.event)

    queue = SocketQueue(clock=asyncio.get_running_loop().time)
    queue.desk.queue.note = note
    learner, alive = await queue.client("learner"), await queue.client("alive")
    await learner.open("train", replace(TRAIN, lease_s=LEASE_S))
    await learner.submit("train", tasks(0, 1))
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, queue.address], stdout=subprocess.PIPE, preexec_fn=die_with_parent
    )
    try:
        assert worker.stdout is not None
        assert await asyncio.to_thread(worker.stdout.readline) == b"has renewed\n"
    finally:
        worker.kill()
        worker.communicate()
    (again,) = await lease(alive, 1)
    assert again.task.ordinal == 0
    first, second = [event for event in events if isinstance(event, Leased)]
    (renewed,) = [event for event in events if isinstance(event, Renewed)]
    assert Requeued(0, "expired") in events
    assert (first.worker.split("/")[0], second.worker.split("/")[0]) == ("generator-0", "alive")
    assert first.deadline - first.at == pytest.approx(6.0)
    assert first.deadline < renewed.deadline < second.at
    await queue.close()
    assert LEASE_S < PATIENCE_S < WAIT_S
