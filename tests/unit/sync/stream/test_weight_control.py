"""Who may ask a publisher, and what nobody can make it do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import CONFIG, SMALL, Generator, Learner, closing_all

from asyncrl.errors import WeightSyncError
from asyncrl.rpc.keys import ClientKeys, client_keys, make_keys
from asyncrl.rpc.message import PROTOCOL, SEAL, sealed
from asyncrl.rpc.server import LONGEST_WAIT_S
from asyncrl.sync.stream.sender import MOST_JOBS

closing = pytest.fixture(closing_all)


def keys_in(folder: Path) -> ClientKeys:
    make_keys(folder)
    keys = client_keys(str(folder))
    assert keys is not None
    return keys


def test_with_keys_those_who_hold_them_get_weights_and_nobody_else(tmp_path: Path, closing: Callable) -> None:
    keys, strange = keys_in(tmp_path / "own"), keys_in(tmp_path / "strange")
    learner = closing(Learner(SMALL, 2, CONFIG, keys=keys))
    learner.publish(0)
    for who, others in (("none", None), ("strange", strange)):
        outsider = closing(Generator(who, learner, learner.whole, CONFIG, keys=others))
        with pytest.raises(WeightSyncError, match=rf"{who}.*queue\.keys.*hello"):
            outsider.fetch(-1, 5.0)
    insider = closing(Generator("insider", learner, learner.whole, CONFIG, keys=keys))
    insider.check(insider.fetch(-1, 10.0), 0)
    refused = learner.publishers[0].stats
    assert any(refused()["refused"] >= 2 for _ in range(1000) if insider.subscriber.newest(0, 0.0) is None)


def test_relays_ask_for_the_keys_too(tmp_path: Path, closing: Callable) -> None:
    keys = keys_in(tmp_path / "own")
    learner = closing(Learner(SMALL, 1, CONFIG, keys=keys))
    learner.publish(0)
    relay = closing(Generator("a", learner, learner.whole, CONFIG, keys=keys))
    relay.check(relay.fetch(-1, 10.0), 0)
    learner.endpoints = [relay.relay.endpoint]
    outsider = closing(Generator("outsider", learner, learner.whole, CONFIG))
    with pytest.raises(WeightSyncError, match=r"outsider.*queue\.keys.*hello"):
        outsider.fetch(-1, 5.0)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KINDS = [
    "hello",
    "attach",
    "newest",
    "pin",
    "send",
    "unpin",
    "alive",
    "bye",
    "join",
    "route",
    "held",
    "leave",
    "other",
]
NAMES = ["lineage", "who", "plan", "place", "session", "version", "wait_s", "newer_than", "base"]
NAMES += ["host", "layout", "bytes", "endpoint", "failed"]
PLAN = [[["embed", [0, 0], [30, 8], 0]]]
PLACE = {"host": "", "gpu": "", "sees": []}


@st.composite
def evil(draw: st.DrawFn) -> bytes:
    """A request that is right in some fields and anything in others."""
    right = {
        "lineage": 1,
        "who": "g",
        "plan": PLAN,
        "place": PLACE,
        "session": 1,
        "version": 0,
        "wait_s": 0.0,
    }
    fields: dict[str, Any] = {name: value for name, value in right.items() if draw(st.booleans())}
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=3)):
        fields[name] = draw(VALUES)
    message = [PROTOCOL, draw(st.integers(0, 2**64 - 1)), draw(st.sampled_from(KINDS)), fields]
    return sealed(msgpack.packb(draw(st.sampled_from([message, fields, message[:2]]))))


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[tuple[Learner, zmq.Socket[bytes]]]:
    learner = Learner(SMALL, 1, CONFIG)
    learner.publish(0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(learner.endpoints[0])
        yield learner, dealer
    learner.publishers[0].close()


@settings(max_examples=150, deadline=None)
@given(frames=st.lists(evil() | st.binary(max_size=30), min_size=1, max_size=4))
def test_no_request_ends_the_control_thread(
    frames: list[bytes], fuzzed: tuple[Learner, zmq.Socket[bytes]]
) -> None:
    learner, dealer = fuzzed
    for frame in frames:
        dealer.send(frame)
    dealer.send(sealed(msgpack.packb([PROTOCOL, 7, "hello", {"lineage": 1, "who": "g"}])))
    while True:
        assert dealer.poll(10_000), "no answer to a good request"
        _, number, verdict, fields = msgpack.unpackb(dealer.recv()[SEAL.size :])
        if number == 7 and verdict == "ok" and "world" in fields:
            break
    assert learner.publishers[0]._server.server._thread.is_alive()


@pytest.mark.parametrize("wait_s", [float("inf"), float("nan"), -1.0, 2 * LONGEST_WAIT_S])
def test_a_wait_that_is_no_time_is_refused(wait_s: float, closing: Callable) -> None:
    learner = closing(Learner(SMALL, 1, CONFIG))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(learner.endpoints[0])
        asked = {"lineage": 1, "who": "g"}
        joined = {**asked, "host": "h", "layout": "l", "bytes": 1, "endpoint": None}
        dealer.send(sealed(msgpack.packb([PROTOCOL, 1, "join", joined])))
        dealer.send(
            sealed(msgpack.packb([PROTOCOL, 2, "newest", {**asked, "newer_than": -1, "wait_s": wait_s}]))
        )
        answers = []
        for _ in range(2):
            assert dealer.poll(10_000)
            answers.append(msgpack.unpackb(dealer.recv()[SEAL.size :])[1:3])
    assert answers == [[1, "ok"], [2, "error"]]


def test_what_a_peer_makes_a_rank_keep_is_bounded(closing: Callable) -> None:
    """It never enters its channel, so that no transfer ends."""
    learner = closing(Learner(SMALL, 1, CONFIG))
    learner.publish(0)
    server = learner.publishers[0]._server.server
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(learner.endpoints[0])
        asked = {"lineage": 1, "who": "g", "session": 1, "version": 0, "junk": "x" * 100_000}

        def answer(kind: str, **fields: Any) -> list[Any]:
            dealer.send(sealed(msgpack.packb([PROTOCOL, 1, kind, {**asked, **fields}])))
            assert dealer.poll(10_000)
            return list(msgpack.unpackb(dealer.recv()[SEAL.size :])[2:])

        assert answer("attach", plan=PLAN, place=PLACE)[0] == "ok"
        assert answer("pin", wait_s=0.0) == ["ok", {"pinned": True}]
        for _ in range(MOST_JOBS):
            dealer.send(sealed(msgpack.packb([PROTOCOL, 1, "send", asked])))
        assert answer("send")[1]["reason"] == "busy"
        dealer.send(sealed(msgpack.packb([PROTOCOL, 1, "pin", {**asked, "version": 1, "wait_s": 60.0}])))
        assert answer("alive")[0] == "ok"
        assert [parked.request.fields for parked in server._parked.values()] == [{}]
        place = {"host": "h", "layout": "l", "bytes": 1, "endpoint": None}
        assert answer("join", **place)[0] == "ok"
        for name in ("host", "layout", "endpoint"):
            assert answer("join", **{**place, name: "x" * 1000})[1]["reason"] == "malformed"


def test_a_peer_waits_for_one_thing_at_a_time(closing: Callable) -> None:
    learner = closing(Learner(SMALL, 1, CONFIG))
    generator = closing(Generator("g", learner, learner.whole, CONFIG))
    assert generator.subscriber.newest(-1, 0.0) is None
    link = generator.subscriber._links[0]
    asked = {"who": "g", "lineage": 1, "newer_than": -1, "wait_s": 60.0}
    for _ in range(100):
        link._rpc.request("newest", asked)
    link.held(3)  # all of them have been read
    assert len(learner.publishers[0]._server.server._parked) == 1
