"""The faults of bench.chaos: their order by seed, a full disk without rights, and the verdict on a run."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from bench.chaos.__main__ import kinds_of
from bench.chaos.faults import KINDS, Fault, Faults
from bench.chaos.history import History
from bench.chaos.jumping_clock import FOLDER, JumpingClock
from bench.chaos.processes import limit_files
from bench.chaos.proxy import Proxy
from bench.chaos.runs import Outcome
from bench.chaos.verdict import broken, by_fault

WRITER = """
import sys
for line in sys.stdin:
    try:
        with open(sys.argv[1], "a") as file:
            file.write(line)
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


def order(folder: Path, seed: int, postponed: str = "") -> list[str]:
    """Kinds of two rounds; one of them is put off once."""
    found = []
    with closing(Proxy()) as proxy:
        faults = Faults(KINDS, proxy, JumpingClock(folder / "clock"), None, random.Random(seed))
        while len(found) < 2 * len(KINDS):
            kind = faults.next_kind()
            if kind == postponed:
                faults.postpone(kind)
                postponed = ""
            else:
                found.append(kind)
    return found


def test_a_seed_draws_the_same_order_again_and_each_kind_once_a_round(tmp_path: Path) -> None:
    first = order(tmp_path, 3)
    assert first == order(tmp_path, 3) != order(tmp_path, 4)
    for found in (first, order(tmp_path, 3, postponed=first[0])):
        assert sorted(found[: len(KINDS)]) == sorted(found[len(KINDS) :]) == sorted(KINDS)


def test_a_process_cannot_write_until_there_is_room_again(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "file")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        answers = []
        for limit in (None, 0, None):
            limit_files([psutil.Process(writer.pid)], *([] if limit is None else [limit]))
            print("x", file=writer.stdin, flush=True)
            answers.append(writer.stdout.readline().strip())
    assert answers == ["written", "File too large", "written"]


def test_the_clock_of_another_process_jumps_and_its_monotonic_one_does_not(tmp_path: Path) -> None:
    clock = JumpingClock(tmp_path / "clock")
    clock.jump(-7200.0)
    words = [sys.executable, "-c", "import time; print(time.time(), time.time_ns() / 1e9, time.monotonic())"]
    env = {**os.environ, **clock.environment(), "PYTHONPATH": str(FOLDER)}
    before = time.monotonic()
    printed = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
    seconds, from_ns, monotonic = map(float, printed.split())
    assert time.time() - 7300.0 < seconds <= from_ns < time.time() - 7100.0
    assert before <= monotonic <= time.monotonic()


def outcome(versions: list[int], staleness: float, groups: float = 0) -> Outcome:
    rows = [{"version": version, "train/staleness/max": staleness} for version in versions]
    none = dict.fromkeys(("faults", "restarts", "corrupted", "refused", "seconds", "longest_pause_s"))
    return Outcome(**none, rows=rows, summary={"groups_trained": groups}, history=History())  # type: ignore[arg-type]


def test_what_does_not_hold_is_named() -> None:
    assert broken(outcome([1, 2, 3], 2.0), max_staleness=2) == []
    assert broken(outcome([1, 2], 3.0), max_staleness=2) == ["staleness 3 is above the bound of 2"]
    assert broken(outcome([1, 3], 0.0), max_staleness=2) == ["versions with gaps, or twice: [1, 3]"]
    assert broken(outcome([1], 0.0, groups=4), 2) == ["0 tasks were trained, the learner counts 4"]


def test_pauses_are_told_by_kind_and_by_who_was_struck() -> None:
    faults = [Fault("kill", "queue", 1.0, 2.0), Fault("kill", "queue", 5.0, 4.0), Fault("stop", "queue", 9.0)]
    assert by_fault(faults) == {
        "kill queue": {"count": 2, "longest_s": 4.0, "median_s": 3.0, "resumed": 0},
        "stop queue": {"count": 1, "longest_s": 0.0, "median_s": 0.0, "resumed": 0},
    }


def test_a_kind_that_is_none_is_named() -> None:
    assert kinds_of("kill,cut") == ["kill", "cut"]
    with pytest.raises(argparse.ArgumentTypeError, match="no kinds of faults: fire; there are kill, stop"):
        kinds_of("kill,fire")
