"""What a client sends cannot make the broker grow: neither values in values, nor requests that wait."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import msgpack
import pytest
from dispatcher_cases import FOREVER, TRAIN, opened_desk, reply_of
from raw_request import envelope

from asyncrl.queue.broker import client_state, long_poll, queue_state
from asyncrl.queue.broker.dispatcher import Dispatcher
from asyncrl.queue.broker.queue_state import QueueState
from asyncrl.queue.wire import wire

MIB = 1 << 20


@contextmanager
def memory_below(nbytes: int) -> Iterator[None]:
    """The most that is allocated inside, at any time."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < nbytes


def empty_lists(count: int) -> bytes:
    """A list of lists of `1 << 16` empty lists."""
    inner = b"\xdd" + (1 << 16).to_bytes(4, "big") + b"\x90" * (1 << 16)
    return b"\xdd" + (count >> 16).to_bytes(4, "big") + inner * (count >> 16)


BOMB = empty_lists(2 * MIB)
"""2 MiB, and more than 100 MiB once it is unpacked."""


def head(requests: bytes = b"\x90", **more: bytes) -> bytes:
    """An envelope of packed fields."""
    plain = {"newest": 1, "waiting": [1], "run": "run", "session": "raw/1"}
    fields = {key: msgpack.packb(value) for key, value in plain.items()} | {"requests": requests} | more
    packed = b"".join(msgpack.packb(key) + value for key, value in fields.items())
    return wire.ENVELOPE_MAGIC + bytes([0x80 + len(fields)]) + packed


def request(op: str, **args: bytes) -> bytes:
    """The packed list of one request, whose arguments are packed values."""
    packed = b"".join(msgpack.packb(key) + value for key, value in args.items())
    arguments = bytes([0x80 + len(args)]) + packed
    return b"\x91\x94\x01" + msgpack.packb(op) + msgpack.packb(arguments) + b"\x00"


NAME = msgpack.packb("train")
FLOODS = {
    "a field that nobody knows": head(request("hello"), more=BOMB),
    "the numbers of requests": head(waiting=BOMB),
    "the requests": head(BOMB),
    "a request": head(b"\x91" + BOMB),
    "an argument of a wrong kind": head(request("lookup", key=BOMB)),
    "an argument that nobody knows": head(request("hello", more=BOMB)),
    "leases of one stream": head(request("give_back", stream=NAME, leases=BOMB)),
    "leases of many streams": head(
        request(
            "renew", stats=b"\xc4\x00", leases=b"\xdf\x00\x01\x00\x00" + (b"\xa2ab" + b"\x90") * (1 << 16)
        )
    ),
    "a snapshot": head(
        request(
            "open",
            stream=NAME,
            settings=msgpack.packb(asdict(TRAIN)),
            snapshot=msgpack.packb(wire.ENVELOPE_MAGIC + BOMB),
        )
    ),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_values_in_values_are_refused_before_they_are_unpacked(flood: str) -> None:
    desk = opened_desk()
    with memory_below(16 * MIB):
        replies = desk.receive(b"odd", [FLOODS[flood]], 0.0)
    error = reply_of(replies)["error"]
    assert error is None or error[0] in ("wire", "refused")
    assert desk.queue.refused["bug"] == 0


def test_a_value_has_so_many_entries_and_so_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "UNCHECKED_BYTES", 0)
    monkeypatch.setattr(wire, "MAX_VALUES", 6)
    monkeypatch.setattr(wire, "MAX_DEPTH", 3)
    for value in ([1, 2, 3, 4, 5], {"a": 1, "b": [2]}, [[[]]], ["x" * 300, b"y" * 70_000, 1.5, -1, None]):
        assert wire.unpack_value(msgpack.packb(value)) == value
    for value in ([1, 2, 3, 4, 5, 6], {"a": 1, "b": [2, 3]}, [[[[1]]]], [[], [], {"a": {}}, 1]):
        with pytest.raises(wire.WireError, match="more than"):
            wire.unpack_value(msgpack.packb(value))


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_value_that_ends_early_is_not_msgpack(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "UNCHECKED_BYTES", 0)
    packed = msgpack.packb({"a": [1, 300, 70_000, 1 << 40, 1.5], "b": "x" * 40, "c": b"y" * 9, "d": [[], {}]})
    with pytest.raises(wire.WireError, match="not msgpack"):
        wire.unpack_value(packed[:-cut])


# ---------------------------------------------------------------------- requests that wait


def waiting_submit(number: int, nbytes: int, waiting: list[int] | None = None) -> bytes:
    """Of a stream that nobody has opened."""
    tasks = [[0, bytes(nbytes)]]
    return envelope(
        "submit", number, waiting=waiting, stream="eval", tasks=tasks, min_version=0, wait_s=3600.0
    )


def test_bytes_of_requests_that_wait_are_bounded_for_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_poll, "CLIENT_BYTES", 100_000)
    desk = opened_desk()
    assert desk.receive(b"a", [waiting_submit(1, 45_000)], 0.0) == []
    assert desk.receive(b"a", [waiting_submit(2, 45_000, [1, 2])], 0.0) == []
    refused = reply_of(desk.receive(b"a", [waiting_submit(3, 45_000, [1, 2, 3])], 0.0))
    assert refused["error"][:2] == ["refused", "full"]
    assert "100000 are allowed" in refused["error"][2]
    assert desk.receive(b"b", [waiting_submit(1, 45_000)], 0.0) == []
    assert (desk.parked, desk.queue.refused["full"]) == (3, 1)
    # One that is over makes room.
    assert desk.receive(b"a", [waiting_submit(4, 45_000, [2, 4])], 0.0) == []


def test_bytes_of_requests_that_wait_are_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones wait all the same, so that nobody's flood keeps others from waiting."""
    monkeypatch.setattr(long_poll, "ALL_BYTES", 100_000)
    desk = opened_desk()
    for who in (b"a", b"b"):
        assert desk.receive(who, [waiting_submit(1, 45_000)], 0.0) == []
    refused = reply_of(desk.receive(b"c", [waiting_submit(1, 45_000)], 0.0))
    assert refused["error"][:2] == ["refused", "full"]
    assert desk.receive(b"d", [envelope("lookup", key="weights", wait_s=9.0)], 0.0) == []
    status = reply_of(desk.receive(b"e", [envelope("status")], 0.0))["value"]
    assert status["parked"] == 3
    assert 90_000 < status["parked_bytes"] < 100_000
    desk.tick(3600.0)
    assert reply_of(desk.receive(b"e", [envelope("status", 2)], 0.0))["value"]["parked_bytes"] == 0


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("submit", {"tasks": [[o, b""] for o in range(1000)], "min_version": 0}),
        ("collect", {"learner_epoch": 1, "got": [1 << 40] * 1000}),
    ],
)
def test_many_small_entries_count_as_what_they_take(op: str, args: dict[str, Any]) -> None:
    desk = opened_desk()
    call = envelope(op, stream="eval", wait_s=9.0, **args)
    if op == "collect":
        settings = {**asdict(TRAIN), "max_staleness": None, "window": None}
        desk.receive(b"x", [envelope("open", stream="eval", settings=settings)], 0.0)
    assert desk.receive(b"w", [call], 0.0) == []
    assert desk.parked_bytes > 64_000


def test_a_request_that_is_over_takes_no_memory() -> None:
    """It would have waited for an hour."""
    desk = Dispatcher(QueueState("run"))
    with memory_below(48 * MIB):
        for number in range(1, 41):
            assert desk.receive(b"w", [waiting_submit(number, 4 * MIB)], 0.0) == []
    assert desk.parked == 1


def test_only_what_has_a_payload_brings_frames() -> None:
    desk = opened_desk()
    call = envelope("lookup", frames=1, key="x", wait_s=FOREVER / 1000)
    assert reply_of(desk.receive(b"w", [call, bytes(9)], 0.0))["error"][0] == "wire"
    assert desk.parked == 0


# ---------------------------------------------------------------------- what is kept


def test_bytes_of_the_registry_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_state, "REGISTRY_BYTES", 1000)
    desk = opened_desk()
    for number, (key, size, reason) in enumerate(
        [("a", 500, None), ("b", 490, None), ("c", 20, "full"), ("b", 400, None), ("c", 20, None)], 1
    ):
        replies = desk.receive(b"w", [envelope("post", number, key=key, value=bytes(size))], 0.0)
        error = reply_of(replies)["error"]
        assert (error and error[1]) == reason


def test_bytes_of_the_stats_of_workers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat counts nevertheless."""
    monkeypatch.setattr(queue_state, "STATS_BYTES", 1000)
    desk = opened_desk(tasks=1)
    lease = {"stream": "train", "held": 0, "lineage": 0, "most": 1}
    ((ordinal, epoch, *_),) = reply_of(desk.receive(b"w", [envelope("lease", 1, **lease)], 0.0))["value"]
    for number, size in enumerate((900, 1000, 1001), 2):
        renew = envelope("renew", number, leases={"train": [[ordinal, epoch]]}, stats=bytes(size))
        assert reply_of(desk.receive(b"w", [renew], 0.0))["value"]["lost"] == []
    assert [len(stats) for stats in desk.queue.workers.values()] == [1000]
    assert desk.queue.refused["full"] == 1


# ---------------------------------------------------------------------- replies that nobody reads


def looked_up(desk: Dispatcher, who: bytes, number: int, now: float = 0.0, read: bool = False) -> Any:
    """The error of the reply, or the length of the value. read: all earlier replies."""
    waiting = [number] if read else [*range(1, number + 1)]
    replies = desk.receive(who, [envelope("lookup", number, waiting=waiting, key="large")], now)
    if not replies:
        return None
    reply = reply_of(replies)
    return reply["error"][1] if reply["error"] else len(reply["value"]["value"])


def test_bytes_of_replies_that_nobody_reads_are_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four clients of ten replies would be over the limit. One that reads is served all the same."""
    monkeypatch.setattr(client_state, "ALL_BYTES", 30_000)
    monkeypatch.setattr(client_state, "SMALL_BYTES", 2_000)
    desk = opened_desk()
    desk.receive(b"w", [envelope("post", key="large", value=bytes(1000))], 0.0)
    results = [looked_up(desk, who, number) for number in range(1, 11) for who in (b"a", b"b", b"c", b"d")]
    assert results.count(1000) + results.count("busy") == 40
    assert 26 <= results.count(1000) <= 30
    assert desk.unread_bytes < 31_100
    assert desk.queue.refused["busy"] == results.count("busy")
    assert [looked_up(desk, b"reader", number, read=True) for number in range(1, 20)] == [1000] * 19
    for who in (b"a", b"b", b"c", b"d"):
        assert looked_up(desk, who, 20, read=True) == 1000
    desk.tick(1e6)  # all are silent for long
    assert desk.unread_bytes == 0


def test_a_reply_is_not_sent_again_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a client that repeats its request faster than it reads."""
    monkeypatch.setattr(client_state, "CLIENT_BYTES", 10_000)
    desk = opened_desk()
    desk.receive(b"w", [envelope("post", key="large", value=bytes(1000))], 0.0)
    results = [looked_up(desk, b"a", 1) for _ in range(100)]
    assert (results.count(1000), results.count(None)) == (10, 90)
    assert looked_up(desk, b"a", 1, now=client_state.AGAIN_S / 2) is None
    assert looked_up(desk, b"a", 1, now=client_state.AGAIN_S) == 1000
    assert desk.queue.refused["unread"] == 91


def test_a_large_value_is_sent_again_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket holds a copy of each."""
    monkeypatch.setattr(client_state, "SMALL_BYTES", 500)
    desk = opened_desk()
    desk.receive(b"w", [envelope("post", key="large", value=bytes(1000))], 0.0)
    assert [looked_up(desk, b"a", 1) for _ in range(4)] == [1000, 1000, None, None]
    assert looked_up(desk, b"a", 1, now=client_state.AGAIN_S) == 1000
    assert looked_up(desk, b"a", 2, now=client_state.AGAIN_S, read=True) == 1000
