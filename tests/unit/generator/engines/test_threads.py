"""Blocking functions off the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncrl.generator.threads import in_thread


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
