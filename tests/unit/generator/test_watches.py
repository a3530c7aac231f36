"""An event loop that stands still, and one that is slow or was stopped."""

from __future__ import annotations

import subprocess
import sys

from asyncrl.errors import DeadlineError
from asyncrl.generator.watches import LONGEST_LOOK_S, LoopWatch

BLOCKS = """
import asyncio, time
from asyncrl.generator.watches import LoopWatch

def step():
    while True: pass

async def generate():
    with LoopWatch("generator-0", 0.2):
        await asyncio.sleep(0)
        step()

asyncio.run(generate())
"""


def test_code_that_blocks_the_loop_ends_its_process_and_is_named() -> None:
    ended = subprocess.run([sys.executable, "-c", BLOCKS], capture_output=True, text=True, timeout=60)
    assert ended.returncode == DeadlineError.exit_code
    assert ended.stderr.startswith("asyncrl generator: generator-0 waited ")
    assert "<string>:6 in step" in ended.stderr
    assert "generator.progress_deadline_s=0.2" in ended.stderr


def test_ticks_and_pauses_of_the_whole_process_are_no_standstill() -> None:
    watch = LoopWatch("generator-0", 3 * LONGEST_LOOK_S)
    assert not watch.look(0.0)
    assert not watch.look(1e6)  # this process was stopped
    assert not watch.look(1e6 + LONGEST_LOOK_S)
    watch.tick()
    assert not watch.look(1e6 + 2 * LONGEST_LOOK_S)
    assert [watch.look(1e6 + n * LONGEST_LOOK_S) for n in (3, 4, 5)] == [False, False, True]
