"""The broker's and the client's cores, joined by networks that lose, repeat, reorder and forge messages."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import msgpack
import pytest
from dispatcher_cases import B, Network, counting, envelope, lease_args, opened_desk, reply, reply_of, submit
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_request import request_of

from asyncrl.errors import AsyncRLError, DeadlineError, RefusedError, WireError
from asyncrl.queue.broker import handlers
from asyncrl.queue.broker.dispatcher import MAX_CLIENTS, SILENT_S, Dispatcher
from asyncrl.queue.broker.handlers import handle
from asyncrl.queue.client.session import (
    BUSY_S,
    CREDIT_BYTES,
    CREDIT_REQUESTS,
    RENEW_S,
    RESEND_S,
    ReplyValue,
    Session,
)
from asyncrl.queue.protocol.requests import VERBS, HelloRequest, PostRequest, Request
from asyncrl.queue.wire import wire
from asyncrl.queue.wire.envelope import MAX_REQUESTS, UNKNOWN, pack_envelope, sealed, unpack_envelope

# ---------------------------------------------------------------------- waiting


def test_a_request_waits_for_what_it_needs_and_no_longer() -> None:
    net = Network(opened_desk())
    lease = net.ask("worker", "lease", lease_args(), wait_s=10.0)
    early = net.ask("worker", "lookup", {"key": "weights"}, wait_s=5.0)
    net.deliver()
    assert (net.results, net.desk.parked) == ({}, 2)
    net.deliver(6.0)
    assert net.value(early) == {"found": False}
    submit(net.desk, 0, 1, net.now)
    net.deliver()
    assert [entry[0] for entry in net.value(lease)] == [0]
    assert net.desk.parked == 0


def test_who_comes_later_does_not_overtake() -> None:
    """Even if its message is read in the same burst as the one that made way."""
    desk = opened_desk()
    desk.receive(b"first", [envelope("lease", wait_s=10.0, **lease_args())], 0.0)
    submit(desk, 0, 1)
    assert desk.receive(b"second", [envelope("lease", wait_s=10.0, **lease_args())], 0.0) == []
    (letter,) = desk.tick(0.0)
    assert (letter.identity, desk.parked) == (b"first", 1)


def test_who_waits_behind_others_is_tried_though_nothing_moved() -> None:
    desk = opened_desk(tasks=2 * B)
    desk.receive(b"a", [envelope("lease", **lease_args(most=2 * B))], 0.0)
    submit(desk, 2 * B, 1)
    desk.tick(0.0)  # admission: nothing more for version 0
    desk.receive(b"old", [envelope("lease", wait_s=10.0, **lease_args())], 0.0)
    assert desk.tick(0.0) == []
    desk.receive(b"odd", [envelope("lease", wait_s=10.0, **lease_args(lineage=3))], 0.0)
    assert reply_of(desk.tick(0.0))["error"][1] == "lineage"


def test_a_move_costs_one_attempt_per_line_however_many_wait() -> None:
    desk = opened_desk()
    for i in range(1000):
        args = lease_args(held=i % 3, most=1 + i % 5)
        desk.receive(str(i).encode(), [envelope("lease", wait_s=10.0, **args)], 0.0)
    desk.tick(0.0)
    assert desk.parked == 1000
    asked = counting(desk)
    submit(desk, 0, 2)
    assert len(desk.tick(0.0)) == 2
    assert (
        len(asked) <= 1 + 2 + 2 * 3
    )  # submit, the answers, and twice the three lines that cannot be answered
    asked.clear()
    desk.tick(0.0)
    assert asked == []


@pytest.mark.parametrize("generators", [7])
def test_nobody_starves_though_tasks_are_always_scarce(generators: int) -> None:
    """One task at a time for many that ask again at once, one of them with many requests under way."""
    net = Network(opened_desk())
    got = dict.fromkeys((f"g{i}" for i in range(generators)), 0)
    waiting = [("g0", net.ask("g0", "lease", lease_args(held=9), wait_s=1e3)) for _ in range(20)]
    waiting += [(who, net.ask(who, "lease", lease_args(held=9), wait_s=1e3)) for who in got if who != "g0"]
    net.deliver()
    for ordinal in range(3 * generators):
        submit(net.desk, ordinal, 1)
        net.deliver()
        ((who, key),) = [each for each in waiting if each[1] in net.results]
        ((leased, epoch, *_),) = net.value(key)
        got[who] += 1
        waiting.remove((who, key))
        waiting.append((who, net.ask(who, "lease", lease_args(held=9), wait_s=1e3)))
        net.ask(who, "drop", {"stream": "train", "ordinal": leased, "epoch": epoch, "reason": "done"})
        net.deliver()
    assert set(got.values()) == {3}


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("lease"), st.integers(0, 3), st.integers(0, 2), st.integers(1, 3)),
        st.tuples(st.just("submit"), st.integers(1, 5)),
        st.tuples(st.just("commit"), st.integers(0, 3)),
        st.tuples(st.just("give_back"), st.integers(0, 3)),
        st.tuples(st.just("claim"), st.integers(0, 1), st.booleans()),
        st.tuples(st.just("trained")),
        st.tuples(st.just("room")),
        st.tuples(st.just("lookup"), st.sampled_from("ab")),
        st.tuples(st.just("post"), st.sampled_from("ab")),
        st.tuples(st.just("wait"), st.floats(0.0, 40.0)),
    ),
    max_size=40,
)


@given(OPERATIONS)
@settings(max_examples=120, deadline=None)
def test_after_every_burst_whoever_still_waits_could_not_be_answered(
    operations: list[tuple[Any, ...]],
) -> None:
    """The index of who waits for what against trying everybody."""
    net = Network(opened_desk(tasks=2, lease_s=30.0))
    leases: list[tuple[str, int, int]] = []
    seen: set[tuple[bytes, int]] = set()
    version = 0
    for number, (op, *what) in enumerate(operations):
        state = net.desk.queue.streams["train"].ledger.state
        match op, what:
            case "lease", (who, held, most):
                net.ask(f"g{who}", op, lease_args(held=held, most=most), wait_s=20.0 + number)
            case "submit", (count,):
                submit(net.desk, state.tasks.next, count, net.now)
            case "commit" | "give_back", (at,) if leases:
                who, ordinal, epoch = leases.pop(at % len(leases))
                _end_lease(net, op, who, ordinal, epoch)
            case "claim", (rank, whole):
                args = {"learner_epoch": 1, "step": version + rank, "index": 0, "rank": 0, "max_tokens": 9}
                net.ask("learner", op, {"stream": "train", "whole": whole, **args}, wait_s=20.0)
            case "trained", _:
                net.ask("learner", op, {"stream": "train", "learner_epoch": 1, "step": version})
            case "room", _:
                net.ask("feeder", op, {"stream": "train"}, wait_s=20.0)
            case (("lookup" | "post"), (key,)):
                value = {"value": b""} if op == "post" else {}
                net.ask("anyone", op, {"key": key, **value}, wait_s=0.0 if op == "post" else 20.0)
            case "wait", (seconds,):
                net.now += seconds
        net.deliver()
        version = net.desk.queue.streams["train"].ledger.state.steps.version
        for key in net.results.keys() - seen:
            _note_leases(net, key, leases)
        seen |= net.results.keys()
        for waiter in net.desk._waiting._waiters.values():
            assert waiter.until > net.now
            assert handle(copy.deepcopy(net.desk.queue), waiter.request, net.now) is None


def _end_lease(net: Network, op: str, who: str, ordinal: int, epoch: int) -> None:
    if op == "give_back":
        net.ask(who, op, {"stream": "train", "leases": [[ordinal, epoch]]})
        return
    numbers = {"tokens": 3, "nbytes": 4, "start_version": -1, "digest": ordinal}
    net.ask(who, op, {"stream": "train", "ordinal": ordinal, "epoch": epoch, **numbers}, frames=[b"data"])


def _note_leases(net: Network, key: tuple[bytes, int], leases: list[tuple[str, int, int]]) -> None:
    result = net.results[key]
    if key[0].startswith(b"g") and isinstance(result, ReplyValue) and isinstance(result.value, list):
        leases += [(key[0].decode(), ordinal, epoch) for ordinal, epoch, *_ in result.value]


# ---------------------------------------------------------------------- once, whatever the network does


def test_a_request_that_comes_again_is_answered_as_before() -> None:
    desk = opened_desk(tasks=2)
    ask = [envelope("lease", 7, **lease_args())]
    first = reply_of(desk.receive(b"raw", ask, 0.0))
    assert reply_of(desk.receive(b"raw", ask, 1.0)) == first
    assert len(desk.queue.streams["train"].ledger.state.tasks.leased) == 1


def test_a_late_copy_of_a_request_that_is_over_is_not_done() -> None:
    desk = opened_desk(tasks=2)
    ask = [envelope("lease", 7, **lease_args())]
    desk.receive(b"raw", ask, 0.0)
    desk.receive(b"raw", [envelope("hello", 8)], 0.0)  # waits for 8 alone: 7 has arrived
    assert desk.receive(b"raw", ask, 1.0) == []
    assert len(desk.queue.streams["train"].ledger.state.tasks.leased) == 1


def test_what_is_not_waited_for_any_more_stops_waiting() -> None:
    net = Network(opened_desk())
    _, request_id = net.ask("fickle", "lease", lease_args(), wait_s=1e3)
    net.deliver()
    assert net.desk.parked == 1
    net.session("fickle").abandon(request_id)
    net.deliver()
    assert net.desk.parked == 0


def test_a_grant_that_crosses_its_cancellation_is_given_back() -> None:
    net = Network(opened_desk(tasks=1))

    def give_back(granted: Any) -> Request:
        return request_of("give_back", {"stream": "train", "leases": [[o, e] for o, e, *_ in granted]})

    who, request_id = net.ask("fickle", "lease", lease_args(), undo=give_back)
    net.collect()
    net.arrive(*net.to_desk.pop())  # granted; the reply is under way
    net.session("fickle").abandon(request_id)
    net.deliver()
    state = net.desk.queue.streams["train"].ledger.state
    assert (len(state.tasks.leased), len(state.tasks.pending), (who, request_id) in net.results) == (
        0,
        1,
        False,
    )


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0), st.floats(0.0, 0.6))
@settings(max_examples=60, deadline=None)
def test_on_a_hostile_network_every_task_is_leased_once_to_somebody_who_knows(
    workers: int, tasks: int, seed: int, loss: float
) -> None:
    """Messages of both directions are lost, repeated and reordered; the sessions only ever send again."""
    random = Random(seed)
    net = Network(opened_desk(tasks=min(tasks, 2 * B)))
    keys = [
        net.ask(f"g{i}", "lease", lease_args(most=1), wait_s=100.0) for i in range(workers) for _ in range(3)
    ]
    for _ in range(60):
        net.now += RESEND_S / 2
        for identity, session in net.sessions.items():
            net.settle(identity, session.tick(net.now))
        net.collect()
        net.to_clients += [(letter.identity, letter.frames) for letter in net.desk.tick(net.now)]
        _storm(net.to_desk, net.arrive, random, loss)
        _storm(net.to_clients, net.reach, random, loss)
    net.deliver(RESEND_S)
    net.deliver(RESEND_S)
    known = [(key[0], o, e) for key in keys if key in net.results for o, e, *_ in net.value(key)]
    ledger = net.desk.queue.streams["train"].ledger
    leased = [(f"g{i}".encode(), o, e) for i in range(workers) for o, e in ledger.state.leases.of(f"g{i}/1")]
    assert sorted(known) == sorted(leased)
    assert len(known) == min(tasks, 2 * B, 3 * workers)


def _storm(messages: list[Any], deliver: Any, random: Random, loss: float) -> None:
    random.shuffle(messages)
    for message in [messages.pop() for _ in range(random.randint(0, len(messages)))]:
        for _ in range(random.choice((1, 1, 2))):
            if random.random() >= loss:
                deliver(*message)
        if random.random() < 0.3:
            messages.append(message)  # and a copy for later


# ---------------------------------------------------------------------- credit


def test_a_client_that_sends_and_never_reads_is_told_that_it_is_busy() -> None:
    desk = opened_desk()
    for i in range(1, 1001):
        waiting = range(max(1, i - 99), i + 1)
        desk.receive(b"deaf", [envelope("status", i, waiting=waiting)], 0.0)
        assert len(desk._clients[b"deaf"].unread) <= MAX_REQUESTS
    assert desk.queue.refused["busy"] == 1000 - MAX_REQUESTS
    many = envelope("status", 1001, waiting=range(1, 1001))
    assert reply_of(desk.receive(b"deaf", [many], 0.0))["error"][0] == "wire"


def test_a_client_waits_for_credit_before_it_sends() -> None:
    net = Network(opened_desk())
    keys = [net.ask("eager", "lookup", {"key": f"k{i}"}, wait_s=50.0) for i in range(100)]
    net.deliver()
    assert net.desk.parked == CREDIT_REQUESTS
    net.deliver(50.0)
    net.deliver(50.0)
    assert [net.value(key) for key in keys] == [{"found": False}] * 100
    assert net.desk.queue.refused["busy"] == 0


def test_bytes_under_way_are_bounded_but_one_large_payload_may_go() -> None:
    session = Session("run", "w/1", "here")
    huge, small = memoryview(bytes(CREDIT_BYTES + 1)), b"x"
    for frame in (huge, small, small):
        session.request(HelloRequest(), [frame], 9.0, 0.0)
    (message,) = session.outgoing()
    assert len(message[1]) == CREDIT_BYTES + 1
    session.receive(reply(1), 0.0)
    assert [m[1:] for m in session.outgoing()] == [[small, small]]


def test_a_request_that_is_refused_as_busy_is_asked_again_later() -> None:
    session = Session("run", "w/1", "here")
    session.request(request_of("hello"), (), 9.0, 0.0)
    assert len(session.outgoing()) == 1
    assert session.receive(reply(1, error=["refused", "busy", ""]), 1.0) == []
    assert session.next_time() == 1.0 + BUSY_S
    assert session.tick(1.0 + BUSY_S) == []
    assert len(session.outgoing()) == 1


def test_clients_beyond_the_limit_are_forgotten_oldest_first() -> None:
    desk = opened_desk()
    desk.receive(b"silent", [envelope("lookup", key="x", wait_s=1e3)], 0.0)
    for i in range(MAX_CLIENTS):
        desk.receive(str(i).encode(), [envelope("hello")], 0.0)
    assert (len(desk._clients), desk.parked) == (MAX_CLIENTS, 0)


def test_what_a_client_that_has_gone_did_not_read_is_let_go() -> None:
    desk = opened_desk()
    desk.receive(b"gone", [envelope("status", 1)], 0.0)
    desk.receive(b"gone", [envelope("lookup", 2, waiting=[1, 2], key="x", wait_s=1e3)], 0.0)
    desk.receive(b"alive", [envelope("lookup", 1, key="x", wait_s=1e3)], 0.0)
    desk.receive(b"alive", [envelope("lookup", 1, key="x", wait_s=1e3)], SILENT_S)  # sent again
    desk.tick(SILENT_S)
    assert desk._clients.keys() >= {b"gone", b"alive"}
    desk.tick(SILENT_S + 1.0)
    assert (desk._clients.keys(), desk.parked) == ({b"alive"}, 1)


def test_the_status_has_how_long_each_client_is_silent_until_its_goodbye() -> None:
    desk = opened_desk()

    def silent_s(now: float) -> Any:
        desk.receive(b"alive", [_named("alive", "hello", int(now))], now)
        return reply_of(desk.receive(b"alive", [_named("alive", "status", 100 + int(now))], now))["value"][
            "silent_s"
        ]

    desk.receive(b"old", [_named("g", "hello", 1)], 1.0)
    desk.receive(b"new", [_named("g", "hello", 1)], 2.0)  # started again under the same name
    assert silent_s(5.0) == {"raw": 5.0, "g": 3.0, "alive": 0.0}
    desk.receive(b"old", [_named("g", "goodbye", 2)], 6.0)
    desk.receive(b"new", [_named("g", "goodbye", 2)], 6.0)
    assert silent_s(7.0) == {"raw": 7.0, "alive": 0.0}


def _named(name: str, op: str, number: int) -> bytes:
    return pack_envelope({**unpack_envelope(envelope(op, number)), "session": f"{name}/1"})


# ---------------------------------------------------------------------- a session's time


def test_a_connection_is_renewed_when_a_reply_is_due_and_no_message_came() -> None:
    session = Session("run", "w/1", "here")
    assert not session.renew_due(1e9)  # nobody waits
    session.request(request_of("lease", lease_args(), 20.0), (), 600.0, 100.0)
    assert not session.renew_due(119.9 + RENEW_S)  # the broker may park it for 20 s
    assert session.renew_due(120.0 + RENEW_S)
    session.receive([b"unreadable"], 139.0)
    assert not session.renew_due(119.9 + 3 * RENEW_S)  # the next connection has twice the time
    assert session.renew_due(120.0 + 3 * RENEW_S)
    session.receive(reply(99), 170.0)
    assert not session.renew_due(169.9 + RENEW_S)
    session.reconnected(180.0)
    assert not session.renew_due(179.9 + RENEW_S)
    assert session.renew_due(180.0 + RENEW_S)


def test_a_request_is_sent_again_until_its_deadline_which_names_everybody() -> None:
    session = Session("run", "lonely/77", "tcp://10.0.0.1:5")
    request_id = session.request(request_of("lease", lease_args(), 3.0), (), 8.0, 100.0)
    assert len(session.outgoing()) == 1
    assert session.tick(104.9) == []
    assert session.outgoing() == []
    assert session.tick(105.0) == []
    assert len(session.outgoing()) == 1
    session.reconnected(106.0)
    assert len(session.outgoing()) == 1
    assert session.next_time() == 111.0
    (outcome,) = session.tick(111.0)
    assert outcome.number == request_id
    assert isinstance(outcome.result, DeadlineError)
    assert str(outcome.result) == (
        "lonely waited 11.0 s for the queue at tcp://10.0.0.1:5: an answer to 'lease' did not come"
    )
    ((notice,),) = session.outgoing()
    assert unpack_envelope(notice)["waiting"] == []
    assert session.next_time() is None


def test_a_request_that_is_sent_again_waits_no_longer_for_that() -> None:
    """Else a broker that is new to it would answer after the client's deadline."""
    net = Network(opened_desk())
    key = net.ask("patient", "lookup", {"key": "x"}, wait_s=50.0, deadline_s=10.0)
    net.deliver()
    net.deliver(30.0)
    net.desk = Dispatcher(net.desk.queue)
    net.session("patient").reconnected(net.now)
    net.deliver()
    net.deliver(19.0)
    assert key not in net.results
    net.deliver(1.0)
    assert net.value(key) == {"found": False}


def test_a_notice_is_not_taken_for_the_request_that_was_sent_before_it() -> None:
    """The newest request is lost, and then an older one is given up: the broker hears of the newest by the notice."""
    desk, session = opened_desk(tasks=1), Session("run", "w/1", "here")
    given_up = session.request(request_of("lookup", {"key": "weights/0"}, 60.0), (), 60.0, 0.0)
    lease = session.request(request_of("lease", lease_args()), (), 60.0, 0.0)
    session.outgoing()  # lost
    session.abandon(given_up)
    (notice,) = session.outgoing()
    assert desk.receive(b"w", notice, 0.0) == []
    session.tick(RESEND_S)
    (again,) = session.outgoing()
    (letter,) = desk.receive(b"w", again, RESEND_S)
    (outcome,) = session.receive(letter.frames, RESEND_S)
    assert outcome.number == lease
    assert isinstance(outcome.result, ReplyValue)


def test_a_deadline_says_what_the_broker_complained_of() -> None:
    session = Session("run", "old/1", "here")
    session.request(request_of("hello"), (), 1.0, 0.0)
    session.receive(reply(UNKNOWN, error=["wire", "", "protocol version 1"]), 0.5)
    (outcome,) = session.tick(1.0)
    assert "it says: protocol version 1" in str(outcome.result)


@pytest.mark.parametrize(
    "noise",
    [
        [],
        [b""],
        [b"noise"],
        [pack_envelope({"replies": 1})],
        [pack_envelope({"replies": [b"\x90"]})],
        reply([1]),
        reply("1"),
    ],
)
def test_what_is_no_reply_does_no_harm(noise: list[bytes]) -> None:
    session = Session("run", "w/1", "here")
    session.request(request_of("hello"), (), 9.0, 0.0)
    assert session.receive(noise, 0.0) == []
    good = reply(1, 5, payload=[b"payload"])
    assert [outcome.result for outcome in session.receive(good, 0.0)] == [ReplyValue(5, [b"payload"])]
    assert session.receive(good, 0.0) == []


def test_what_no_broker_would_read_is_refused_where_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session("run", "w/1", "here")
    with pytest.raises(WireError, match="'hello' is larger than a message may be"):
        session.request(HelloRequest(), [b""] * wire.MAX_FRAMES, 9.0, 0.0)
    with pytest.raises(WireError, match="'post' is larger"):
        session.request(PostRequest(key="k", value=bytes(wire.MAX_ENVELOPE_BYTES)), (), 9.0, 0.0)
    assert session.outgoing() == []


# ---------------------------------------------------------------------- strange input


def serves(desk: Dispatcher) -> bool:
    """Whether a good client still gets its answers."""
    net = Network(desk)
    key = net.ask("good", "status", {})
    net.deliver()
    return bool(net.value(key)["run"] == "run")


ARGUMENTS = (
    "stream key value held lineage most wait_s tasks leases settings snapshot epoch ordinal tokens nbytes digest "
    "step rank index max_tokens whole reason at stats min_version start_version learner_epoch columns stage attempt "
    "dropped version waited"
)
NAMES = st.sampled_from(ARGUMENTS.split())
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.integers(0, 9)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=40)
    | st.just("train"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.integers(0, 9), inner, max_size=4),
    max_leaves=8,
)


REQUESTS = st.tuples(
    st.sampled_from([*VERBS, "explode"]),
    st.dictionaries(NAMES, VALUES),
    st.lists(st.binary(max_size=9), max_size=2),
)


@given(st.lists(REQUESTS, max_size=8))
@settings(max_examples=150, deadline=None)
def test_any_operation_with_any_arguments_is_answered_parked_or_over(asked: list[tuple[Any, ...]]) -> None:
    desk = opened_desk(tasks=3)
    for number, (op, args, payload) in enumerate(asked, 1):
        letters = desk.receive(
            b"odd", [envelope(op, number, frames=len(payload), **args), *payload], float(number)
        )
        letters += desk.tick(float(number))
        parked = (b"odd", number) in desk._waiting
        assert parked or number in {reply_of([letter])["id"] for letter in letters}
    assert desk.queue.refused["bug"] == 0
    assert serves(desk)


@given(st.dictionaries(st.sampled_from(["newest", "waiting", "run", "session", "requests"]), VALUES))
@settings(max_examples=200, deadline=None)
def test_an_envelope_with_strange_fields_is_answered_or_over(fields: dict[str, Any]) -> None:
    desk = opened_desk()
    message = unpack_envelope(envelope("hello"))
    letters = desk.receive(b"odd", [pack_envelope({**message, **fields})], 0.0)
    assert letters or desk.parked or fields.keys() & {"newest", "waiting", "requests"}
    assert serves(desk)


@given(st.lists(st.binary(max_size=60), max_size=3), st.integers(0, 400), st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_noise_and_damaged_envelopes_are_counted_and_answered(noise: list[bytes], at: int, bit: int) -> None:
    desk = opened_desk()
    assert reply_of(desk.receive(b"odd", noise, 0.0))["error"][0] == "wire"
    damaged = bytearray(envelope("lease", wait_s=5.0, **lease_args()))
    damaged[at % len(damaged)] ^= 1 << bit
    desk.receive(b"odd", [bytes(damaged)], 0.0)
    desk.receive(b"odd", [bytes(damaged[: at % len(damaged)])], 0.0)
    assert desk.queue.refused["malformed"] == 3
    assert serves(desk)


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


BOMBS = {
    "a list of 2^32 entries": b"\xdd\xff\xff\xff\xff",
    "a map of 2^32 entries": b"\xdf\xff\xff\xff\xff",
    "bytes of 2^32": b"\xc6\xff\xff\xff\xff",
    "lists in lists": nested(100_000),
    "lists in lists, each with room for many": (b"\xdd" + (1 << 17).to_bytes(4, "big")) * 1000,
    "too many frames": None,
    "too many bytes": None,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_malformed(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = opened_desk()
    frames = [sealed(BOMBS[bomb] or b"")]
    if bomb == "too many frames":
        frames = [envelope("hello", frames=wire.MAX_FRAMES), *([b""] * wire.MAX_FRAMES)]
    if bomb == "too many bytes":
        monkeypatch.setattr(wire, "MAX_ENVELOPE_BYTES", 100)
        frames = [envelope("hello", padding="x" * 100)]
    assert reply_of(desk.receive(b"odd", frames, 0.0))["error"][0] == "wire"
    assert desk.queue.refused["malformed"] == 1


def test_deep_arguments_of_a_request_that_waits_do_no_harm() -> None:
    desk = opened_desk()
    deep: Any = msgpack.unpackb(nested(500))
    desk.receive(b"odd", [envelope("lookup", key="x", wait_s=1.0, more=deep)], 0.0)
    assert desk.parked == 1
    assert reply_of(desk.tick(2.0))["value"] == {"found": False}


def test_a_bug_is_the_requests_own_problem_but_a_journal_that_fails_is_everybodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(error: Exception) -> Any:
        def handler(queue: Any, request: Any, context: Any) -> None:
            raise error

        return handler

    desk = opened_desk()
    monkeypatch.setitem(handlers.HANDLERS, HelloRequest, fail(ZeroDivisionError("0/0")))
    reply = reply_of(desk.receive(b"a", [envelope("hello")], 0.0))
    assert reply["error"] == ["refused", "bug", "ZeroDivisionError: 0/0"]
    assert serves(desk)
    for error in (AsyncRLError("the journal is gone"), OSError(28, "no space left")):
        monkeypatch.setitem(handlers.HANDLERS, HelloRequest, fail(error))
        with pytest.raises(type(error)):
            desk.receive(b"a", [envelope("hello", 2)], 0.0)


def test_goodbye_ends_what_the_client_left_waiting() -> None:
    net = Network(opened_desk(tasks=1))
    lease = net.ask("leaver", "lease", lease_args())
    net.ask("leaver", "lookup", {"key": "x"}, wait_s=1e3)
    net.deliver()
    assert len(net.value(lease)) == 1
    net.ask("leaver", "goodbye", {})
    net.deliver()
    assert (net.desk.parked, b"leaver" in net.desk._clients) == (0, False)
    assert len(net.desk.queue.streams["train"].ledger.state.tasks.pending) == 1


def test_status_tells_of_clients_and_of_who_waits() -> None:
    net = Network(opened_desk())
    net.ask("a", "lookup", {"key": "x"}, wait_s=1e3)
    status = net.ask("b", "status", {})
    net.deliver()
    assert (net.value(status)["clients"], net.value(status)["parked"]) == (3, 1)


def test_another_run_is_refused_though_others_wait_for_the_same() -> None:
    net = Network(opened_desk())
    net.ask("a", "lookup", {"key": "x"}, wait_s=1e3)
    net.deliver()
    net.sessions[b"stranger"] = Session("other", "stranger/1", "here")
    key = net.ask("stranger", "lookup", {"key": "x"}, wait_s=1e3)
    net.deliver()
    refused = net.results[key]
    assert isinstance(refused, RefusedError)
    assert refused.reason == "wrong_run"
