"""A queue's broker in a process of a bench."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.config.schema import QueueConfig
from asyncrl.queue.broker.broker import Broker
from asyncrl.queue.broker.recovery import open_recovery
from asyncrl.rpc.keys import server_keys


@contextmanager
def serving(config: QueueConfig, run: str, folder: Path, keys: str | None = None) -> Iterator[str]:
    """A broker on a thread of its own, which keeps in `folder` what `config` says. Its address."""
    broker = Broker("tcp://127.0.0.1:*", run, keys=server_keys(keys))
    recovery = open_recovery(config, run, folder, now=time.monotonic())
    broker.take_up(recovery.queue, recovery.flush)
    thread = threading.Thread(target=broker.serve)
    thread.start()
    yield broker.bound_address
    broker.stop()
    thread.join()
    recovery.close()
