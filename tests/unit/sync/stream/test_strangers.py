"""Strangers at every socket of learner ranks and relays that listens: the stream goes on, and they get nothing."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from stream_cases import LARGE, LARGE_CONFIG, Generator, Learner, closing_all
from test_gone_subscribers import freed, resources
from test_weight_control import keys_in

closing = pytest.fixture(closing_all)

pytestmark = pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux")

WAIT_S = 30.0
LISTENING = "0A"

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"%-20s" + bytes(32)
"""Of ZMTP 3.1 (https://rfc.zeromq.org/spec/37), to be filled with a mechanism."""


def listening() -> set[tuple[str, int]]:
    """(address, port) of each TCP socket of this process that listens."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    own = {os.readlink(link) for link in links if os.path.lexists(link)}
    found = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == LISTENING and f"socket:[{inode}]" in own:
            address, port = (int(part, 16) for part in local.split(":"))
            found.add((socket.inet_ntoa(struct.pack("<I", address)), port))
    return found


def greeting(mechanism: bytes) -> bytes:
    return GREETING % mechanism.ljust(20, b"\0")


def words(kind: str, rng: random.Random) -> bytes:
    """What a stranger sends."""
    if kind == "garbage":
        return rng.randbytes(rng.choice([1, 9, 64, 4096]))
    if kind == "half a handshake":
        return greeting(b"CURVE")[: rng.choice([1, 10, 11, 63, 64])]
    if kind == "no keys":
        return greeting(b"NULL") + b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    if kind == "endless frame":
        return greeting(b"CURVE") + b"\x06" + b"\xff" * 8 + bytes(1000)
    return b""


@contextmanager
def strangers(sockets: set[tuple[str, int]], kind: str, count: int) -> Iterator[None]:
    rng = random.Random(0)
    with ExitStack() as stack:
        for address in sockets:
            for _ in range(count):
                caller = stack.enter_context(socket.create_connection(address, WAIT_S))
                caller.sendall(words(kind, rng))
        yield


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("garbage", 30),
        *(
            pytest.param(kind, count, marks=pytest.mark.slow)
            for kind, count in [
                ("half a handshake", 100),
                ("no keys", 100),
                ("endless frame", 100),
                ("silence", 1000),
                ("garbage", 1000),
            ]
        ),
    ],
)
def test_the_stream_goes_on_among_strangers(
    kind: str, count: int, closing: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.sync.stream.subscriber.PARENT_S", WAIT_S)
    before = listening()
    keys, config = keys_in(tmp_path / "keys"), replace(LARGE_CONFIG, fanout=1, backend="tcp")
    learner = closing(Learner(LARGE, 2, config, keys=keys))
    parent, child = (
        closing(Generator(who, learner, learner.whole, config, keys=keys)) for who in ("parent", "child")
    )
    learner.publish(0)
    for generator in (parent, child):
        generator.check(generator.fetch(-1, WAIT_S), 0)
    sockets = listening() - before
    assert len(sockets) == 4, "two ranks, two relays; a channel's socket is closed once its end has come"
    assert {address for address, _ in sockets} == {"127.0.0.1"}
    calm = resources()
    with strangers(sockets, kind, count):
        for version in (1, 2):
            learner.publish(version)
            for generator in (parent, child):
                staged = generator.fetch(version - 1, WAIT_S)
                generator.check(staged, version)
            assert staged.source == "parent"
        late = closing(Generator("late", learner, learner.whole, config, keys=keys))
        late.check(late.fetch(-1, WAIT_S), 2)
        late.subscriber.close()
    freed(calm)
    assert all(publisher.stats()["failures"] == 0 for publisher in learner.publishers)
