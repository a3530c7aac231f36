"""Leases that were granted to a client whose connection has ended in the meantime go to others at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict

from dispatcher_cases import TRAIN, B, lease_args, opened_desk, reply_of, submit
from queue_cases import WAIT_S, serving, tasks
from raw_request import envelope

from asyncrl.queue.broker.broker import Broker
from asyncrl.queue.broker.dispatcher import Dispatcher, OutgoingReply
from asyncrl.queue.client.client import QueueClient
from asyncrl.queue.protocol.replies import Lease


def wait_for_lease(desk: Dispatcher, who: bytes, number: int = 1, **changes: object) -> list[OutgoingReply]:
    request = envelope("lease", number, wait_s=10.0, **lease_args(**changes))
    return desk.receive(who, [request], 0.0)


def ordinals(replies: Sequence[OutgoingReply]) -> list[int]:
    return [entry[0] for entry in reply_of(replies)["value"]]


def test_a_grant_that_cannot_be_sent_goes_to_the_next() -> None:
    desk = opened_desk()
    wait_for_lease(desk, b"dead", most=2)
    wait_for_lease(desk, b"alive", most=9)
    submit(desk, 0, 3)
    replies = desk.tick(0.0)
    assert [reply.identity for reply in replies] == [b"dead", b"alive"]
    assert ordinals(replies[1:]) == [2]
    assert desk.unreachable(b"dead", replies[:1])
    assert ordinals(wait_for_lease(desk, b"alive", number=2, most=9)) == [0, 1]


def test_nothing_waits_for_a_client_that_is_gone() -> None:
    """It had three requests that wait; the first is granted, and cannot be sent."""
    desk = opened_desk()
    for number in (1, 2, 3):
        request = envelope("lease", number, waiting=range(1, number + 1), wait_s=10.0, **lease_args())
        desk.receive(b"dead", [request], 0.0)
    submit(desk, 0, 1)
    assert desk.unreachable(b"dead", desk.tick(0.0))
    assert desk.parked == 0
    assert desk.tick(0.0) == []


def test_a_client_that_comes_back_asks_again_and_gets_another_grant() -> None:
    """Its request is the same as before; the grant that it never saw is void."""
    desk = opened_desk(tasks=1)
    lost = wait_for_lease(desk, b"w")
    assert wait_for_lease(desk, b"w") == lost  # as before, while it may be read
    assert desk.unreachable(b"w", lost)
    again = wait_for_lease(desk, b"w") + desk.tick(0.0)
    ((ordinal, epoch, *_),), ((_, before, *_),) = reply_of(again)["value"], reply_of(lost)["value"]
    assert (ordinal, epoch) == (0, before + 1)


def test_a_grant_that_was_repeated_in_vain_is_given_back_too() -> None:
    desk = opened_desk(tasks=1)
    wait_for_lease(desk, b"w")
    assert desk.unreachable(b"w", wait_for_lease(desk, b"w"))
    assert desk.queue.streams["train"].ledger.counts(0.0)["leased"] == 0


def test_only_what_was_not_sent_comes_back() -> None:
    desk = opened_desk(tasks=2)
    wait_for_lease(desk, b"w")
    hello = desk.receive(b"w", [envelope("hello", 2)], 0.0)
    assert not desk.unreachable(b"w", hello)
    assert not desk.unreachable(b"nobody", hello)
    assert desk.queue.streams["train"].ledger.counts(0.0)["leased"] == 1


def test_a_stream_that_drains_keeps_the_task_of_a_grant_that_was_not_sent() -> None:
    desk = opened_desk(tasks=1)
    lost = wait_for_lease(desk, b"dead")
    desk.receive(b"setup", [envelope("drain", 99, stream="train")], 0.0)
    assert desk.unreachable(b"dead", lost)
    assert ordinals(wait_for_lease(desk, b"alive")) == [0]


def test_a_broker_grants_to_the_living_what_the_dead_had_waited_for() -> None:
    """B dead generators wait first; its clock stands still, so that no lease expires."""

    async def leases_of_the_living(address: str) -> list[Lease]:
        client = QueueClient(address, run="run", who="alive", deadline_s=WAIT_S)
        await client.connect()
        try:
            await client.submit("train", tasks(0, B))
            return await client.lease("train", held=0, lineage=0, most=B, wait_s=WAIT_S)
        finally:
            await client.close()

    broker = Broker("tcp://127.0.0.1:*", "run", clock=lambda: 0.0)
    desk = broker.dispatcher
    desk.receive(b"setup", [envelope("open", stream="train", settings=asdict(TRAIN))], 0.0)
    for number in range(B):
        assert wait_for_lease(desk, b"dead %d" % number) == []
    with serving(broker):
        granted = asyncio.run(leases_of_the_living(broker.bound_address))
    assert [lease.task.ordinal for lease in granted] == list(range(B))
