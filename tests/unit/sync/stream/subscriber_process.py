"""A subscriber to be killed: `subscriber_process.py WHO JSON`. It prints "here" after so many buckets of the newest
version, or after all of it, and waits."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import torch

import asyncrl.sync.stream.link as link
from asyncrl.config.schema import SyncConfig
from asyncrl.sync.layout.layout import from_wire
from asyncrl.sync.stream.subscriber import Subscriber
from asyncrl.sync.tensors.shards import Shards


def main(who: str, said: str) -> None:
    endpoints, wire, bucket_mb, backend, buckets = json.loads(said)
    whole, receive = from_wire(wire), link.receive_buckets

    def some(source: Any, shards: Any, channel: Any, buffers: Any, seconds_left: Any, arrived: Any) -> None:
        def counted(index: int) -> None:
            if index + 1 >= buckets:
                wait()
            arrived(index)

        if buckets == 0:
            wait()
        receive(source, shards, channel, buffers, seconds_left, counted)

    link.receive_buckets = some
    staging = {name: torch.zeros(param.shape) for name, param in whole.items()}
    config = SyncConfig(bucket_mb=bucket_mb, backend=backend)
    subscriber = Subscriber(who, endpoints, Shards(whole, staging), config, 1)
    version = subscriber.newest(-1, 60.0)
    assert version is not None
    subscriber.stage(version)
    wait()


def wait() -> None:
    print("here", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
