"""Blocking functions off the event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from asyncrl.generator.threads import OneThread, in_thread


async def test_a_thread_that_is_done_is_used_again_and_is_never_the_loops() -> None:
    seen = {threading.current_thread()}
    async with asyncio.timeout(30):  # it is free just after its answer: the next call may still find it busy
        while (thread := await in_thread(threading.current_thread)) not in seen:
            seen.add(thread)
    assert thread is not threading.current_thread()


async def test_calls_at_the_same_time_each_have_a_thread_and_one_that_hangs_holds_up_no_other() -> None:
    together, forever = threading.Barrier(3), threading.Event()
    given_up = asyncio.ensure_future(in_thread(forever.wait))
    await asyncio.wait_for(asyncio.gather(*(in_thread(together.wait) for _ in range(3))), 30)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert await asyncio.wait_for(in_thread(lambda a, b: a + b, 2, b=3), 30) == 5
    forever.set()


@pytest.mark.parametrize("raised", [ValueError("no"), StopIteration("no"), SystemExit("no")])
async def test_what_a_call_raises_reaches_its_caller_and_the_next_call_goes_well(
    raised: BaseException,
) -> None:
    def fails() -> None:
        raise raised

    with pytest.raises(BaseException, match="no"):
        await in_thread(fails)
    assert await in_thread(len, "abc") == 3


async def test_calls_of_one_thread_come_in_their_order_and_those_given_up_are_left_out() -> None:
    thread, may_go_on, order = OneThread("t"), threading.Event(), list[int]()
    first = asyncio.ensure_future(thread(may_go_on.wait, 30))
    others = [asyncio.ensure_future(thread(order.append, number)) for number in range(3)]
    await asyncio.sleep(0)
    others[1].cancel()
    await asyncio.sleep(0)
    may_go_on.set()
    assert await first
    await asyncio.gather(*others, return_exceptions=True)
    assert order == [0, 2]
    with pytest.raises(KeyError, match="no"):
        await thread({}.__getitem__, "no")
    assert thread.close(30)


def test_a_call_that_hangs_in_one_thread_does_not_keep_the_process() -> None:
    program = """
import asyncio, threading
from asyncrl.generator.threads import OneThread

async def main():
    thread, begun = OneThread("hangs"), threading.Event()
    def hang():
        begun.set()
        threading.Event().wait()
    call = asyncio.ensure_future(thread(hang))
    while not begun.is_set():
        await asyncio.sleep(0)
    print(thread.close(0.01))

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "False\n"), ended.stderr
