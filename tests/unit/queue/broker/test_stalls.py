"""A broker that stands still, or is behind with its messages, does not take its own silence for that of the workers."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
import zmq
from dispatcher_cases import TRAIN, Network, lease_args, reply_of, submit
from hypothesis import given
from hypothesis import strategies as st
from raw_request import envelope
from recovered_queue import TRAIN as SETTINGS
from recovered_queue import Queue

from asyncrl.queue.broker import broker as broker_module
from asyncrl.queue.broker.broker import BURST, Broker
from asyncrl.queue.broker.clock import STEP_S, LeaseClock
from asyncrl.queue.broker.dispatcher import BEHIND_S, Dispatcher
from asyncrl.queue.broker.queue_state import QueueState

LEASE_S = 6.0
GENERATORS = 1000


def desk_of(generators: int) -> Dispatcher:
    """Its stream has a task for each, all of which may be leased at once."""
    desk = Dispatcher(QueueState("run"))
    settings = replace(TRAIN, groups_per_version=generators, depth=2 * generators, lease_s=LEASE_S)
    desk.receive(b"setup", [envelope("open", stream="train", settings=asdict(settings))], 0.0)
    submit(desk, 0, generators)
    return desk


def lease_one(desk: Dispatcher, who: bytes, now: float) -> tuple[int, int]:
    ((ordinal, epoch, *_),) = reply_of(desk.receive(who, [envelope("lease", **lease_args())], now))["value"]
    return ordinal, epoch


def renew(desk: Dispatcher, who: bytes, lease: tuple[int, int], now: float, number: int = 2) -> Any:
    """What the worker has lost."""
    call = envelope("renew", number, leases={"train": [lease]}, stats=b"\x80")
    return reply_of(desk.receive(who, [call], now))["value"]["lost"]


def test_no_live_lease_is_lost_by_a_stall_of_the_broker() -> None:
    """1.2 leases long. The renewals of that time lie in the sockets, and a burst reads only some before the tick."""
    desk = desk_of(GENERATORS)
    leases = {b"g%d" % i: lease_one(desk, b"g%d" % i, 0.0) for i in range(GENERATORS)}
    desk.tick(0.0)
    now = 1.2 * LEASE_S
    lost = []
    for at, (who, lease) in enumerate(leases.items()):
        lost += renew(desk, who, lease, now)
        if at % BURST == BURST - 1:
            desk.tick(now)
    assert lost == []
    assert desk.queue.streams["train"].ledger.counts(now)["leased"] == GENERATORS


def test_a_worker_that_is_silent_while_the_broker_serves_loses_its_leases_after_the_stall() -> None:
    desk = desk_of(2)
    ledger = desk.queue.streams["train"].ledger
    lease_one(desk, b"dead", 0.0)
    alive = lease_one(desk, b"alive", 0.0)
    now = 100.0  # one pause, which counts for STEP_S
    for number in range(2, 2 + int((LEASE_S - STEP_S) / 0.5)):
        desk.tick(now)
        assert ledger.counts(now)["leased"] == 2
        assert renew(desk, b"alive", alive, now, number) == []
        now += 0.5
    desk.tick(now)
    desk.tick(now + 0.01)
    assert sorted(ledger.state.tasks.leased) == [alive[0]]


def test_a_replay_of_the_journal_that_takes_long_costs_no_lease() -> None:
    """Leases begin anew before the broker serves: at the time that was taken before the replay."""
    queue = Queue(durable=False)
    queue.open()
    queue.submit(0, 1)
    ((ordinal, epoch, *_),) = queue.lease()
    queue.die()
    queue.now += 2 * SETTINGS.lease_s
    Dispatcher(queue.state).tick(queue.now)
    assert queue.ask("renew", leases={"train": [(ordinal, epoch)]}, stats=b"\x80")["lost"] == []


@given(st.lists(st.floats(-1e9, 1e9), min_size=2))
def test_the_time_of_leases_never_goes_back_and_makes_no_jump(looks: list[float]) -> None:
    clock = LeaseClock()
    times = [clock.advance(now) for now in looks]
    for (before, now), (before_time, time) in zip(pairwise(looks), pairwise(times), strict=True):
        assert time - before_time == pytest.approx(min(max(now - before, 0.0), STEP_S), abs=1e-6)


def test_nothing_expires_while_messages_are_left_unread_for_a_while() -> None:
    """A client that floods the broker does not keep a dead worker's lease standing for ever."""
    desk = desk_of(1)
    ledger = desk.queue.streams["train"].ledger
    lease_one(desk, b"dead", 0.0)
    for second in range(int(BEHIND_S) + 1):
        desk.tick(float(second), behind=True)
        assert ledger.state.tasks.leased
    desk.tick(BEHIND_S + 1, behind=True)
    assert not ledger.state.tasks.leased


def test_a_look_at_sockets_that_are_empty_ends_what_is_over() -> None:
    desk = desk_of(1)
    ledger = desk.queue.streams["train"].ledger
    lease_one(desk, b"dead", 0.0)
    for second in range(int(LEASE_S) + 2):
        desk.tick(float(second), behind=True)
    assert ledger.state.tasks.leased
    desk.tick(LEASE_S + 2)
    assert not ledger.state.tasks.leased


def test_a_full_burst_may_leave_messages_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [[zmq.Frame(b"client"), b"garbage"] for _ in range(BURST + 1)]
    monkeypatch.setattr(broker_module.sockets, "receive", lambda _: messages.pop() if messages else [])
    broker = Broker("tcp://127.0.0.1:*", "run")
    try:
        assert [broker._take()[1] for _ in range(3)] == [True, False, False]
    finally:
        broker.close()


def test_a_request_that_waits_gets_the_task_of_a_slow_worker_at_its_end_at_the_latest() -> None:
    """Nothing changes but the time, so nobody tries it before."""
    desk = Dispatcher(QueueState("run"))
    stream = replace(TRAIN, groups_per_version=1, max_staleness=0, lease_s=1e6, hedge_s=5.0)
    desk.receive(b"setup", [envelope("open", stream="train", settings=asdict(stream))], 0.0)
    submit(desk, 0, 3)
    net = Network(desk)
    first = net.ask("slow", "lease", lease_args())
    net.deliver()
    second = net.ask("idle", "lease", lease_args(), wait_s=10.0)
    net.deliver()
    while second not in net.results:
        net.deliver(0.5)
    assert net.now == 10.0
    ((ordinal, epoch, *_),), ((again, later, *_),) = net.value(first), net.value(second)
    assert (again, later > epoch) == (ordinal, True)
