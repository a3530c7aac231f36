"""A broker in a process of its own, for tests that kill it: python broker_process.py ADDRESS FOLDER key=value …"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from asyncrl.config.schema import QueueConfig
from asyncrl.queue.broker.broker import Broker
from asyncrl.queue.broker.recovery import open_recovery


def main(address: str, folder: str, *words: str) -> None:
    """Prints its address once it listens. Words are keys of the section `queue`."""
    config = QueueConfig(**dict(word.split("=", 1) for word in words))
    broker = Broker(address, "run")
    recovery = open_recovery(config, "run", Path(folder), now=time.monotonic())
    broker.take_up(recovery.queue, recovery.flush)
    print(broker.bound_address, flush=True)
    broker.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
