"""A broker survives whatever comes in at its socket: it answers, counts, and serves the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import zmq

from asyncrl.queue import wire
from asyncrl.queue.broker import Broker
from asyncrl.queue.client import BlockingClient
from asyncrl.queue.ledger import StreamSettings
from asyncrl.types import Task

TRAIN = StreamSettings(
    groups_per_version=4, max_staleness=1, window=1, depth=8, max_bytes=1 << 30, lease_s=30.0
)
WAIT_S = 20.0


@dataclass
class Visitor:
    """A bare socket beside a learner that has opened the stream."""

    learner: BlockingClient
    socket: zmq.Socket

    def exchange(self, *frames: bytes) -> dict[str, Any]:
        """Frames in, the reply's envelope out."""
        self.socket.send_multipart(frames)
        return wire.unpack(self.socket.recv_multipart()[0])


@pytest.fixture
def visitor() -> Iterator[Visitor]:
    broker = Broker("tcp://127.0.0.1:*", "run")
    serving = threading.Thread(target=broker.serve)
    serving.start()
    learner = BlockingClient(broker.bound_address, run="run", who="learner", deadline_s=WAIT_S)
    learner.connect()
    learner.open("train", TRAIN)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(broker.bound_address)
        socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        socket.setsockopt(zmq.LINGER, 0)
        yield Visitor(learner, socket)
    learner.close()
    broker.stop()
    serving.join(WAIT_S)
    assert not serving.is_alive()


def envelope(op: str, request_id: int = 1, **args: object) -> bytes:
    return wire.pack({"id": request_id, "op": op, "run": "run", "session": "raw/1", "args": args})


GARBAGE = {
    "empty": b"",
    "noise": b"\xff\xfe\x00garbage",
    "old protocol": b"ARLQ\x00\x80",
    "not a map": wire.ENVELOPE_MAGIC + b"\x01",
    "no fields": wire.pack({}),
    "fields of a wrong kind": wire.pack({"id": "1", "op": 2, "run": None, "session": [], "args": 0}),
    "unknown operation": envelope("explode"),
    "no arguments": envelope("lease"),
    "a wait without end": envelope("lookup", key="x", wait_s=float("nan")),
    "strange settings": envelope("open", stream="train", settings={"depth": "deep"}),
    "a strange snapshot": envelope("open", stream="train", settings=TRAIN.to_wire(), snapshot=b"ARLQ"),
    "strange tasks": envelope("submit", stream="train", tasks=[[0, 0]], min_version=0, wait_s=1),
    "strange leases": envelope("give_back", stream="train", leases=[["a", {}]]),
    "a key of a wrong kind": envelope("post", key=["list"], value=b""),
    "a payload that is missing": envelope(
        "commit", stream="train", ordinal=0, epoch=1, tokens=1, nbytes=9, start_version=0, digest=0
    ),
}


@pytest.mark.parametrize("message", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_answered_counted_and_survived(visitor: Visitor, message: bytes) -> None:
    assert visitor.exchange(message)["error"][0] in ("wire", "refused")
    assert sum(visitor.learner.status()["refused"].values()) == 1


def test_garbage_with_a_payload_or_a_strange_cancellation_does_no_harm(visitor: Visitor) -> None:
    visitor.exchange(b"noise", b"payload")
    visitor.socket.send(envelope("cancel", 2, id=[1]))
    assert visitor.exchange(envelope("hello", 3))["value"]["run"] == "run"


def test_a_request_that_comes_twice_is_done_once(visitor: Visitor) -> None:
    visitor.learner.submit("train", [Task(o, "x") for o in range(4)])
    ask = envelope("lease", 7, stream="train", held=0, lineage=0, most=1)
    assert visitor.exchange(ask) == visitor.exchange(ask)
    assert visitor.learner.status()["streams"]["train"]["leased"] == 1
