"""Calls that share threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from waiting import eventually

from asyncrl.generator.scoring import call_threads
from asyncrl.generator.scoring.call_threads import CallThreads
from asyncrl.generator.threads import in_thread

NEVER_S = 1e6


def calls(most: int, deadline_s: float = NEVER_S) -> CallThreads:
    return CallThreads("reward", most, deadline_s)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opens at the end, so that no thread hangs for ever."""
    opened = threading.Event()
    yield opened
    opened.set()


async def idle(thread: threading.Thread) -> None:
    """Wait until this thread makes calls of others: the last that became idle are the next to make one."""
    while True:
        together = threading.Barrier(4)

        def which(together: threading.Barrier = together) -> threading.Thread:
            together.wait(30)
            return threading.current_thread()

        if thread in await asyncio.gather(*(in_thread(which) for _ in range(4))):
            return


class Clock:
    """A clock that moves by `step` whenever it is looked at."""

    def __init__(self) -> None:
        self.now, self.step, self.looks = 0.0, 0.0, 0

    def monotonic(self) -> float:
        self.looks += 1
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(call_threads, "time", found)
    return found


async def test_short_calls_share_a_thread_that_has_the_functions_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_threads, "JOIN_S", NEVER_S)
    threads = calls(most=8)
    found = await asyncio.gather(*(threads.begin(threading.current_thread) for _ in range(50)))
    assert len(set(found)) == 1
    assert found[0] is not threading.current_thread()
    assert await threads.begin(lambda: threading.current_thread().name) == "reward"


async def test_the_loop_is_woken_once_for_all_calls_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_threads, "JOIN_S", NEVER_S)
    loop, woken, threads = asyncio.get_running_loop(), list[Any](), calls(most=1)
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda function: woken.append(function))
    begun = [threads.begin(lambda: 7) for _ in range(5)]
    begun.append(threads.begin((all_done := threading.Event()).set))
    await asyncio.sleep(0)
    assert all_done.wait(30)
    await eventually(lambda: threads.under_way == 0)
    assert len(woken) == 1
    woken[0]()
    assert [await call for call in begun] == [7] * 5 + [None]


async def test_threads_join_while_calls_wait_up_to_the_most(gate: threading.Event, clock: Clock) -> None:
    threads = calls(most=3)
    begun = [threads.begin(lambda: gate.wait(30)) for _ in range(9)]
    await eventually(lambda: threads.under_way == 3)
    for _ in range(4):
        looks = clock.looks
        begun.append(threads.begin(lambda: gate.wait(30)))  # which has the threads looked at
        await eventually(lambda looks=looks: clock.looks > looks)
        assert threads.under_way == 3
    gate.set()
    await asyncio.gather(*begun)
    assert threads.under_way == 0


async def test_as_many_threads_join_as_make_a_long_call(gate: threading.Event, clock: Clock) -> None:
    threads, clock.step = calls(most=64), 1.0  # at each look, all calls under way are long
    begun = [threads.begin(lambda: gate.wait(30)) for _ in range(64)]
    await eventually(lambda: threads.under_way == 64)
    looks_at_threads = clock.looks - 64  # each call that begins looks at the clock, too
    gate.set()
    await asyncio.gather(*begun)
    assert looks_at_threads < 40, "one at each look would take 63"


async def test_calls_that_come_while_another_takes_long_get_a_thread_soon(gate: threading.Event) -> None:
    threads = calls(most=2)
    long = threads.begin(gate.wait)
    await eventually(lambda: threads.under_way == 1)
    for number in range(2):  # before the second, the next look is at the deadline of the long call
        assert await asyncio.wait_for(threads.begin(lambda number=number: number), 30) == number
    gate.set()
    await long


async def test_a_call_that_is_cancelled_once_it_is_done_keeps_the_others_from_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_threads, "JOIN_S", NEVER_S)
    threads, made = calls(most=1), threading.Event()
    first, second = threads.begin(lambda: 1), threads.begin(lambda: 2)
    third = threads.begin(made.set)
    assert made.wait(30)  # the loop knows of none of them yet
    first.cancel()
    assert await asyncio.wait_for(second, 30) == 2
    await third


def test_calls_of_a_later_event_loop_are_made_and_meet_their_deadline(gate: threading.Event) -> None:
    threads, left = calls(most=2), list[threading.Thread]()

    def hang() -> None:
        left.append(threading.current_thread())
        gate.wait()

    async def begins() -> None:
        threads.begin(hang)  # its loop ends before it
        await eventually(lambda: threads.under_way == 1)

    async def later() -> int:
        assert await asyncio.wait_for(threads.begin(lambda: 1), 30) == 1
        gate.set()
        await idle(left[0])
        return int(await asyncio.wait_for(threads.begin(lambda: 2), 30))

    async def late() -> None:
        threads._deadline_s = 0.05
        with pytest.raises(TimeoutError):
            await threads.begin(lambda: time.sleep(1))

    asyncio.run(begins())
    assert asyncio.run(later()) == 2
    asyncio.run(asyncio.wait_for(late(), 30))


async def test_a_machine_without_threads_fails_calls_and_keeps_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    threads = calls(most=1)
    with monkeypatch.context() as patch:
        patch.setattr(call_threads, "begin_in_thread", refuse)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="no more threads"):
                await threads.begin(lambda: 1)
    assert await asyncio.wait_for(threads.begin(lambda: 2), 30) == 2


async def test_a_call_that_takes_too_long_leaves_its_place_to_the_next(gate: threading.Event) -> None:
    threads = calls(most=1, deadline_s=0.05)
    with pytest.raises(TimeoutError):
        await threads.begin(gate.wait)
    assert threads.under_way == 0
    threads._deadline_s = NEVER_S
    assert await asyncio.wait_for(threads.begin(lambda: 1), 30) == 1


async def test_a_call_that_its_caller_gives_up_leaves_its_place_and_one_that_waited_is_not_made(
    gate: threading.Event, clock: Clock
) -> None:
    threads, made = calls(most=1), list[str]()
    hangs = threads.begin(gate.wait)
    await eventually(lambda: threads.under_way == 1)
    waits, last = (threads.begin(lambda name=name: made.append(name)) for name in ("waits", "last"))
    looks = clock.looks
    await eventually(lambda: clock.looks > looks)  # the next look is at the deadline of the call that hangs
    waits.cancel()
    hangs.cancel()
    await asyncio.wait_for(last, 30)
    assert made == ["last"]


async def test_the_thread_of_a_call_that_was_given_up_makes_no_other(gate: threading.Event) -> None:
    threads = calls(most=1)
    left = list[threading.Thread]()

    def hang() -> None:
        left.append(threading.current_thread())
        gate.wait(30)

    given_up = threads.begin(hang)
    await eventually(lambda: threads.under_way == 1)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    held = threading.Event()
    second = threads.begin(lambda: held.wait(30))
    await eventually(lambda: threads.under_way == 1)
    third = threads.begin(threading.current_thread)
    gate.set()
    await idle(left[0])
    assert (third.done(), threads.under_way) == (False, 1)
    held.set()
    await second
    assert await third is not left[0]


async def test_a_first_call_is_before_all_that_wait(gate: threading.Event) -> None:
    threads, order = calls(most=1), list[int]()
    hangs = threads.begin(lambda: gate.wait(30))
    await eventually(lambda: threads.under_way == 1)
    waiting = [threads.begin(lambda number=number: order.append(number)) for number in (1, 2)]
    await asyncio.sleep(0)
    first = threads.begin(lambda: order.append(0), first=True)
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(hangs, first, *waiting)
    assert order == [0, 1, 2]


async def test_the_deadline_counts_from_the_moment_at_which_a_thread_begins(
    clock: Clock, gate: threading.Event
) -> None:
    threads, before = calls(most=1, deadline_s=10.0), threading.Event()
    first = threads.begin(lambda: before.wait(30))
    second = threads.begin(lambda: gate.wait(30))
    third = threads.begin(lambda: 3)  # as long as it waits, the threads are looked at
    await eventually(lambda: threads.under_way == 1)
    clock.now = 8.0
    before.set()
    assert await first
    await eventually(lambda: threads.under_way == 1)
    clock.now, looks = 17.9, clock.looks
    await eventually(lambda: clock.looks > looks + 2)
    assert not second.done()
    clock.now = 18.0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(second, 30)
    assert await third == 3


@pytest.mark.parametrize("raised", [ValueError("no"), StopIteration("no"), SystemExit("no")])
async def test_what_a_call_raises_reaches_its_caller_and_the_next_call_goes_well(
    raised: BaseException,
) -> None:
    def fail() -> None:
        raise raised

    threads = calls(most=1)
    failed, good = threads.begin(fail), threads.begin(lambda: 1)
    with pytest.raises(Exception, match="no"):
        await failed
    assert await good == 1
