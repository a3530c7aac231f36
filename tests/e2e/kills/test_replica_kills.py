"""A chain of generators in processes of their own; one in the middle is killed at a message drawn at random."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from asyncrl.config.schema import SyncConfig
from asyncrl.sync.layout.layout import whole_layout
from asyncrl.sync.stream.publisher import Publisher
from asyncrl.sync.tensors.shards import Shards

pytestmark = pytest.mark.slow

SHAPES = {"w": ((2048, 1024), "float32")}  # 8 MB in buckets of 1 MB
CONFIG = SyncConfig(bucket_mb=1.0, deadline_s=20.0, silence_s=600.0, fanout=1)
LAST = 4

CHILD = """
import json, os, signal, sys
import torch
from asyncrl.config.schema import (SyncConfig)
from asyncrl.rpc import client, server
from asyncrl.sync.stream import relay
from asyncrl.sync.tensors.shards import Shards
from asyncrl.sync.layout.layout import whole_layout
from asyncrl.sync.stream.subscriber import Subscriber

from stream_cases import fetch

who, endpoint, shapes, config, dies_at, last = json.loads(sys.argv[1])
layout, messages = whole_layout(shapes), 0

def counted(original):
    def call(*of, **more):
        global messages
        messages += 1
        if messages == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*of, **more)
    return call

# Every control message that leaves or comes in at a relay, and every bucket.
client.RpcClient.request = counted(client.RpcClient.request)
server.RpcServer._receive = counted(server.RpcServer._receive)
relay.Relay.arrived = counted(relay.Relay.arrived)
relay.StagingSource.ready = counted(relay.StagingSource.ready)

staging = {name: torch.zeros(param.shape) for name, param in layout.items()}
subscriber = Subscriber(who, [endpoint], Shards(layout, staging), SyncConfig(**config), 1)
subscriber.newest(-1, 0.0)
print("joined", flush=True)
held = -1
while held < last:
    staged = fetch(subscriber, held, 60.0)  # to join the store of a relay that died meanwhile takes torch up to 30
    assert staged is not None, "no version came"
    assert staged.checksum.holds(Shards(layout, staging)), staged
    held = staged.version
    subscriber.held(held)
    print(held, messages, flush=True)
sys.stdin.read()
subscriber.close()
"""


class Child:
    def __init__(self, who: str, publisher: Publisher, dies_at: int | None) -> None:
        config = {name: getattr(CONFIG, name) for name in ("bucket_mb", "deadline_s", "silence_s", "fanout")}
        spec = json.dumps([who, publisher.endpoint, SHAPES, config, dies_at, LAST])
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, spec],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def reach(self, version: int) -> None:
        while (line := self.line()) and int(line.split()[0]) < version:
            pass
        assert line, f"it ended with {self.process.wait()} before version {version}"


@contextmanager
def chain(publisher: Publisher, **dies_at: int | None) -> Iterator[list[Child]]:
    """By name. Each has joined before the next is started, so that each feeds the next."""
    with ExitStack() as stack:
        children = []
        for who, at in dies_at.items():
            child = Child(who, publisher, at)
            stack.enter_context(child.process)
            stack.callback(child.process.kill)
            assert child.line() == "joined"
            children.append(child)
        yield children


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    live = {name: torch.zeros(shape) for name, (shape, _) in SHAPES.items()}
    made = Publisher(0, 1, Shards(whole_layout(SHAPES), live), CONFIG, 1)
    yield made
    made.close()


def publish(publisher: Publisher, version: int) -> None:
    for parts in publisher._snapshots.live.tensors.values():
        parts[0].fill_(version + 1)
    publisher.publish(version)


def test_those_below_killed_relays_reach_the_newest_version(publisher: Publisher) -> None:
    draw = random.Random(5)
    dies_at = {who: draw.randint(8, 60) for who in ("second", "third")}
    with chain(publisher, first=None, **dies_at, fourth=None) as (first, *victims, below):
        for version in range(LAST + 1):
            publish(publisher, version)
            first.reach(version)
        below.reach(LAST)
        for victim, message in zip(victims, dies_at.values(), strict=True):
            assert victim.process.wait(30.0) == -9, f"message {message} was never reached"
        with chain(publisher, late=None) as (late,):
            late.reach(LAST)
            held = publisher._members.versions()
            assert [held[who] for who in ("first", "fourth", "late")] == [LAST] * 3
        for child in (first, below):
            assert child.process.poll() is None
