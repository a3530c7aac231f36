"""A queue of each kind, and a disk for what it keeps."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from disk_faults import Disk
from queue_cases import AnyQueue, ProcessQueue, SocketQueue

from asyncrl.config.schema import QueueConfig
from asyncrl.queue.broker import clock
from asyncrl.queue.broker.recovery import open_recovery


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Empty. Its power may fail."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = Disk(folder, monkeypatch)
    yield made
    made.close()


@pytest.fixture(params=["memory", "file", "redis", "local"])
async def queue(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AnyQueue]:
    """Its clock is turned by hand: a jump is time that passes, not a pause of the broker."""
    monkeypatch.setattr(clock, "STEP_S", math.inf)
    queue: AnyQueue
    if request.param == "local":
        queue = ProcessQueue()
    elif request.param == "memory":
        queue = SocketQueue()
    else:
        url = request.getfixturevalue("redis_server").url if request.param == "redis" else None
        kept = QueueConfig(store=request.param, durable="payload", redis_url=url)
        queue = SocketQueue(recovery=open_recovery(kept, "run", tmp_path, now=0.0))
    yield queue
    await queue.close()
