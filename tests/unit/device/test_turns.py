"""Turns on a device: one process at a time, whoever waits is next, and a killed process keeps nobody out."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
from processes import until

from asyncrl.device.turns import DeviceLock, DeviceTurn, dealt
from asyncrl.errors import DeadlineError

HOLDER = """
import sys, time
from pathlib import Path
from asyncrl.device.turns import DeviceLock
lock = DeviceLock(Path(sys.argv[1]), ["0"], "generator-0")
lock.take(30.0)
print("taken", flush=True)
time.sleep(600)
"""


def lock(folder: Path, who: str, *devices: str) -> DeviceLock:
    return DeviceLock(folder, devices or ["0"], who)


def test_one_has_the_device_and_the_other_learns_that_it_is_wanted(tmp_path: Path) -> None:
    generator, learner = lock(tmp_path, "generator-0"), lock(tmp_path, "learner rank 0")
    assert generator.take(1.0)
    assert (generator.held, generator.wanted()) == (True, False)
    waiting = threading.Thread(target=learner.take, args=(30.0,))
    waiting.start()
    until(generator.wanted, "another that waits")
    assert not learner.held
    generator.give()
    waiting.join(30.0)
    assert (generator.held, learner.held, learner.wanted()) == (False, True, False)


def test_who_gives_it_up_does_not_overtake_who_waits(tmp_path: Path) -> None:
    generator, learner = lock(tmp_path, "generator-0"), lock(tmp_path, "learner rank 0")
    generator.take(1.0)
    turns: list[str] = []

    def learn() -> None:
        learner.take(30.0)
        turns.append("learner")
        learner.give()

    waiting = threading.Thread(target=learn)
    waiting.start()
    until(generator.wanted, "another that waits")
    generator.give()
    assert generator.take(30.0)
    turns.append("generator")
    waiting.join(30.0)
    assert turns == ["learner", "generator"]


def test_a_rank_of_two_engines_waits_for_both_and_takes_neither_alone(tmp_path: Path) -> None:
    first, second = lock(tmp_path, "generator-0", "cpu0"), lock(tmp_path, "generator-1", "cpu1")
    learner = lock(tmp_path, "learner rank 0", "cpu0", "cpu1")
    first.take(1.0)
    with pytest.raises(DeadlineError, match=r"learner rank 0 .*generator-0"):
        learner.take(0.1)
    assert second.take(1.0)
    first.give()
    with pytest.raises(DeadlineError, match=r"learner rank 0 .*generator-1"):
        learner.take(0.1)
    second.give()
    assert learner.take(1.0)


def test_a_wait_ends_when_the_process_is_to_end(tmp_path: Path) -> None:
    lock(tmp_path, "generator-0").take(1.0)
    assert lock(tmp_path, "learner rank 0").take(30.0, stopping=lambda: True) is False


def test_a_killed_process_gives_its_turn_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "taken\n"
            learner = lock(tmp_path, "learner rank 0")
            with pytest.raises(DeadlineError, match="generator-0"):
                learner.take(0.1)
        finally:
            holder.kill()
    assert learner.take(30.0)


def test_memory_comes_and_goes_with_the_turn(tmp_path: Path) -> None:
    mine, other = lock(tmp_path, "learner rank 0"), lock(tmp_path, "generator-0")
    done: list[str] = []
    turn = DeviceTurn(
        mine, lambda: done.append("park"), lambda: done.append("fetch"), lambda *_: nullcontext(), 30.0
    )
    mine.take(1.0)
    turn.hold()
    turn.offer()
    assert (done, mine.held) == ([], True)
    waiting = threading.Thread(target=other.take, args=(30.0,))
    waiting.start()
    until(mine.wanted, "another that waits")
    turn.offer()
    waiting.join(30.0)
    assert (done, mine.held, other.held) == (["park"], False, True)
    other.give()
    turn.hold()
    assert done == ["park", "fetch"]


@pytest.mark.parametrize(("generators", "ranks"), [(1, 1), (2, 1), (1, 4), (4, 2), (3, 2)])
def test_everybody_has_a_stand_in_for_a_device(generators: int, ranks: int) -> None:
    for count, others in ((generators, ranks), (ranks, generators)):
        shares = [dealt(index, count, others) for index in range(count)]
        assert all(shares)
        assert sorted(device for share in shares for device in share) == [
            f"cpu{device}" for device in range(max(generators, ranks))
        ]
