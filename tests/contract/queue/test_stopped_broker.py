"""A broker process that is stopped for longer than a lease, with generators that wait for its replies meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from queue_cases import TRAIN, WAIT_S, lease, tasks

from asyncrl.errors import DeadlineError
from asyncrl.queue.client.client import QueueClient
from asyncrl.system.signals import die_with_parent

LEASE_S = 6.0
GENERATORS = 50


@pytest.mark.slow
async def test_no_generator_loses_its_lease_and_a_dead_one_does(tmp_path: Path) -> None:
    program = [sys.executable, str(Path(__file__).with_name("broker_process.py"))]
    process = subprocess.Popen(
        [*program, "tcp://127.0.0.1:*", str(tmp_path), "store=file"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    clients: list[QueueClient] = []

    async def connected(who: str, deadline_s: float = WAIT_S) -> QueueClient:
        clients.append(QueueClient(address, run="run", who=who, deadline_s=deadline_s))
        await clients[-1].connect()
        return clients[-1]

    try:
        learner, impatient = await connected("learner"), await connected("impatient", 1.2 * LEASE_S)
        count = GENERATORS + 1
        settings = replace(TRAIN, groups_per_version=count, depth=2 * count, lease_s=LEASE_S)
        await learner.open("train", settings)
        await learner.submit("train", tasks(0, count))
        dead = await connected("dead")
        generators = [await connected(f"generator-{number}") for number in range(GENERATORS)]
        (given_up,) = await lease(dead, 1)
        leases = await asyncio.gather(*(lease(generator, 1) for generator in generators))
        assert {len(each) for each in leases} == {1}
        assert all(not each.lost for each in await asyncio.gather(*(one.renew() for one in generators)))
        os.kill(process.pid, signal.SIGSTOP)
        beats = [asyncio.create_task(one.renew()) for one in generators]
        with pytest.raises(DeadlineError):
            await impatient.status()
        os.kill(process.pid, signal.SIGCONT)
        assert all(not each.lost for each in await asyncio.gather(*beats))
        again: list[int] = []
        while not again:  # the living renew, the dead one does not
            again = [
                each.task.ordinal
                for each in await learner.lease("train", held=0, lineage=0, most=1, wait_s=0.1)
            ]
            assert all(not each.lost for each in await asyncio.gather(*(one.renew() for one in generators)))
        assert again == [given_up.task.ordinal]
    finally:
        os.kill(process.pid, signal.SIGCONT)
        for client in clients:
            await client.close()
        process.kill()
        process.communicate()
