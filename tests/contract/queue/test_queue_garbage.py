"""A broker survives whatever comes in at its socket: it answers, counts, and serves the others."""

from __future__ import annotations

import random
import resource
import socket as sockets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from queue_cases import TRAIN, WAIT_S, serving
from raw_request import envelope

from asyncrl.queue.broker import broker as broker_module
from asyncrl.queue.broker.broker import Broker
from asyncrl.queue.client.client import BlockingClient, QueueClient
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.queue.wire import wire
from asyncrl.queue.wire.envelope import MAX_REQUESTS, pack_envelope, sealed, unpack_replies
from asyncrl.types import Task


@dataclass
class Visitor:
    """A bare socket beside a learner that has opened the stream."""

    broker: Broker
    learner: BlockingClient
    socket: zmq.Socket

    def exchange(self, *frames: bytes) -> dict[str, Any]:
        """Frames in, the reply out."""
        self.socket.send_multipart(frames)
        ((_, value, error, _),) = unpack_replies(self.socket.recv_multipart())
        return {"value": value, "error": error}


@contextmanager
def with_learner() -> Iterator[tuple[Broker, BlockingClient]]:
    with serving(Broker("tcp://127.0.0.1:*", "run")) as broker:
        learner = BlockingClient(
            QueueClient(broker.bound_address, run="run", who="learner", deadline_s=WAIT_S)
        )
        learner.connect()
        learner.open("train", TRAIN)
        yield broker, learner
        learner.close()


@pytest.fixture
def visitor() -> Iterator[Visitor]:
    with with_learner() as (broker, learner), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(broker.bound_address)
        socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        socket.setsockopt(zmq.LINGER, 0)
        yield Visitor(broker, learner, socket)


PROBED_S = 0.2
"""How long after a peer's last segment Linux looks whether it takes bytes again."""

HEAD = {"newest": 1, "waiting": [1], "run": "run", "session": "raw/1"}
GARBAGE = {
    "empty": b"",
    "noise": b"\xff\xfe\x00garbage",
    "old protocol": b"ARLQ\x00\x80",
    "changed on its way": envelope("hello")[:-1] + b"?",
    "not a map": sealed(b"\x01"),
    "no fields": pack_envelope({}),
    "fields of a wrong kind": pack_envelope(
        {"newest": "1", "waiting": 2, "run": None, "session": [], "requests": 0}
    ),
    "a request of a wrong kind": pack_envelope({**HEAD, "requests": [[1, 2, {}, "x"]]}),
    "frames that are not there": pack_envelope({**HEAD, "requests": [[1, "hello", b"\x80", 1]]}),
    "less than no frames": pack_envelope({**HEAD, "requests": [[1, "hello", b"\x80", -1]]}),
    "arguments that are no map": pack_envelope({**HEAD, "requests": [[1, "hello", b"\x90", 0]]}),
    "unknown operation": envelope("explode"),
    "no arguments": envelope("lease"),
    "a wait without end": envelope("lookup", key="x", wait_s=float("nan")),
    "strange settings": envelope("open", stream="train", settings={"depth": "deep"}),
    "a strange snapshot": envelope("open", stream="train", settings=asdict(TRAIN), snapshot=b"ARLQ"),
    "strange tasks": envelope("submit", stream="train", tasks=[[0, 0]], min_version=0, wait_s=1),
    "strange leases": envelope("give_back", stream="train", leases=[["a", {}]]),
    "a key of a wrong kind": envelope("post", key=["list"], value=b""),
    "a key without end": envelope("post", key="k" * 10_000, value=b""),
    "a name that is no line": pack_envelope({**HEAD, "session": "gen\nversion 9/1", "requests": []}),
    "a name that turns the writing around": pack_envelope({**HEAD, "session": "\u202egen/1", "requests": []}),
    "a name without end": pack_envelope({**HEAD, "session": "x" * 300, "requests": []}),
    "a run without end": pack_envelope({**HEAD, "run": "x" * 300, "requests": []}),
    "requests that it cannot know of": envelope("hello", 5, waiting=[5, 6]),
    "too much in a list": sealed(b"\xdd\xff\xff\xff\xff"),
    "lists in lists": sealed(b"\x91" * 100_000),
    "a payload that is missing": envelope(
        "commit", stream="train", ordinal=0, epoch=1, tokens=1, nbytes=9, start_version=0, digest=0
    ),
}


@pytest.mark.parametrize("message", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_answered_counted_and_survived(visitor: Visitor, message: bytes) -> None:
    assert visitor.exchange(message)["error"][0] in ("wire", "refused")
    assert sum(visitor.learner.status()["refused"].values()) == 1


def test_garbage_with_a_payload_does_no_harm(visitor: Visitor) -> None:
    visitor.exchange(b"noise", b"payload")
    assert visitor.exchange(envelope("hello", 3))["value"]["run"] == "run"


def test_a_request_that_comes_twice_is_done_once(visitor: Visitor) -> None:
    visitor.learner.submit("train", [Task(o, "x") for o in range(4)])
    ask = envelope("lease", 7, stream="train", held=0, lineage=0, most=1)
    assert visitor.exchange(ask) == visitor.exchange(ask)
    assert visitor.learner.status()["streams"]["train"]["leased"] == 1


def test_any_noise_on_the_socket_leaves_the_others_their_queue(visitor: Visitor) -> None:
    """Cut, flipped and glued messages, some of them whole; the learner works meanwhile."""
    rng = random.Random(0)
    asks = [envelope("lease", i, stream="train", held=0, lineage=0, most=1) for i in range(1, 9)]
    visitor.socket.setsockopt(zmq.SNDTIMEO, int(WAIT_S * 1000))
    for at in range(400):
        frames = [
            bytearray(rng.choice(asks)),
            *(bytearray(rng.randbytes(9)) for _ in range(rng.randrange(3))),
        ]
        frame = rng.choice(frames)
        if rng.random() < 0.5:
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        else:
            del frame[rng.randrange(len(frame)) :]
        visitor.socket.send_multipart(frames)
        if at % 50 == 0:
            visitor.learner.submit("train", [Task(at // 50, "x")])
    status = visitor.learner.status()
    assert status["streams"]["train"]["next_ordinal"] == 8
    assert status["refused"]["malformed"] > 0
    assert status["refused"].get("bug", 0) == 0


def test_what_does_not_speak_the_protocol_at_all_is_disconnected(visitor: Visitor) -> None:
    host, port = visitor.broker.bound_address.removeprefix("tcp://").split(":")
    rng = random.Random(1)
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03", rng.randbytes(500), b""):
        with sockets.create_connection((host, int(port)), WAIT_S) as raw, suppress(ConnectionError):
            raw.sendall(greeting)
            raw.shutdown(sockets.SHUT_WR)
            while raw.recv(1 << 16):  # until the broker hangs up
                pass
    assert visitor.learner.status()["run"] == "run"


def test_a_frame_that_is_too_large_ends_its_connection_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1 << 16)
    with with_learner() as (broker, learner), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        monitor.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        socket.connect(broker.bound_address)
        socket.send_multipart([envelope("commit", frames=1), bytes((1 << 16) + 1)])
        monitor.recv_multipart()
        assert learner.status()["clients"] == 1
        socket.disable_monitor()
        monitor.close()


def test_a_peer_that_sends_and_never_reads_does_not_make_the_broker_grow(visitor: Visitor) -> None:
    """It says of nothing that it was read; then it lies that everything was, and the socket's own limit holds."""
    visitor.socket.setsockopt(zmq.SNDTIMEO, int(WAIT_S * 1000))
    visitor.socket.setsockopt(zmq.RCVHWM, 1)  # of connections to come
    visitor.socket.disconnect(visitor.broker.bound_address)
    visitor.socket.connect(visitor.broker.bound_address)
    visitor.learner.post("large", "x" * 500_000)
    for i in range(1, 201):
        visitor.socket.send(envelope("lookup", i, waiting=range(1, i + 1), key="large"))
    for i in range(201, 401):
        visitor.socket.send(envelope("lookup", i, key="large"))
    visitor.socket.send(envelope("open", 401, stream="another", settings=asdict(TRAIN)))
    assert visitor.learner.room("another", wait_s=WAIT_S)[1] > 0  # which does not stand in line with lookups
    refused = visitor.learner.status()["refused"]
    assert refused["busy"] == 200 - MAX_REQUESTS
    assert refused["unread"] > 0
    assert sum(len(caller.unread) for caller in visitor.broker.dispatcher._clients.values()) < MAX_REQUESTS


def test_a_broker_opens_more_files_than_a_shell_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        Broker("tcp://127.0.0.1:*", "run").close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(soft, 1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_clients_at_once(visitor: Visitor) -> None:
    """Each waits for a task of its own, and gets it."""
    clients, settings = 1000, asdict(TRAIN) | {"groups_per_version": 1000, "depth": 1000}
    visitor.learner.open("many", msgspec.convert(settings, StreamSettings))
    with ExitStack() as stack:
        peers = []
        for at in range(clients):
            if at % 250 == 0:
                context = stack.enter_context(zmq.Context())
            peer = stack.enter_context(context.socket(zmq.DEALER))
            peer.setsockopt(zmq.LINGER, 0)
            peer.setsockopt(zmq.RCVTIMEO, int(3 * WAIT_S * 1000))
            peer.connect(visitor.broker.bound_address)
            peer.send(envelope("lease", stream="many", held=0, lineage=0, most=1, wait_s=60.0))
            peers.append(peer)
        while visitor.learner.status()["parked"] < clients:
            pass  # every status is a round trip through the broker's loop
        visitor.learner.submit("many", [Task(o, "x") for o in range(clients)])
        leased = [unpack_replies(peer.recv_multipart())[0][1][0][0] for peer in peers]
        assert sorted(leased) == list(range(clients))


@pytest.mark.slow
def test_a_client_that_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own messages go on, so that heartbeats alone would keep its replies in the broker's memory. They come at more
    than PROBED_S: each puts the kernel's look at a full connection off by so much."""
    monkeypatch.setattr(broker_module, "UNREAD_MS", 500)
    with with_learner() as (broker, learner), zmq.Context() as context, context.socket(zmq.DEALER) as silent:
        port = int(broker.bound_address.rpartition(":")[2])

        def connected() -> int:
            every = psutil.Process().net_connections("tcp")
            return sum(one.laddr.port == port and one.status == "ESTABLISHED" for one in every)

        learner.post("large", bytes(1_000_000))
        for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 4096), (zmq.LINGER, 0)):
            silent.setsockopt(option, value)
        silent.connect(broker.bound_address)
        numbers, looking = [*range(1, 33)], wire.pack_value({"key": "large", "wait_s": 0.0})
        head: dict[str, Any] = HEAD | {"newest": 32, "waiting": numbers}
        silent.send(
            pack_envelope(head | {"requests": [[number, "lookup", looking, 0] for number in numbers]})
        )
        assert silent.poll(WAIT_S * 1000)
        end, sent = time.monotonic() + WAIT_S, 0.0
        while connected() > 1:
            assert time.monotonic() < end
            if time.monotonic() - sent > 1.5 * PROBED_S:
                sent = time.monotonic()
                silent.send(pack_envelope(head | {"requests": []}))
            assert learner.lookup("large", 0.0) == bytes(1_000_000)
