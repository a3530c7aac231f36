"""More than a thousand whole runs under faults, on a virtual clock; and the same with a rule of the queue broken."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.queue.wire import envelope

from .mutations import MUTATIONS
from .run import SeedError, simulate_all
from .scenario import FAULTS

ROOT = Path(__file__).parents[2]
FEW, QUICK, ALL, AT_ONCE = 50, 300, 1_000, 125
SOON = 1000
"""A broken rule is found within so many seeds; most are within ten."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Brokers that come back without payloads say so, thousands of times."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def test_some_runs_under_faults() -> None:
    seen = simulate_all(range(QUICK))
    assert set(FAULTS) <= set(seen)
    assert seen["seeds"] == QUICK


def test_runs_whose_replies_have_room_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are granted one by one, and claims come in parts, which faults get between."""
    monkeypatch.setattr(envelope, "REPLY_FRAMES", 1)
    assert simulate_all(range(FEW))["seeds"] == FEW


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_runs_under_faults() -> None:
    batches = [range(first, first + AT_ONCE) for first in range(QUICK, QUICK + ALL, AT_ONCE)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert sum(seen["seeds"] for seen in pool.imap_unordered(simulate_all, batches)) == ALL


def test_a_seed_is_a_run() -> None:
    """To the last event, in any process: what fails can be played again. Sessions alone have names of their own."""
    printed = set()
    for hashes in ("1", "2"):
        words = [sys.executable, "-m", "tests.simulation.run", "--seed", "58", "--trace"]
        done = subprocess.run(
            words, env={**os.environ, "PYTHONHASHSEED": hashes}, cwd=ROOT, capture_output=True
        )
        assert done.returncode == 0, done.stderr.decode()
        printed.add(re.sub(r"/[0-9a-f]{12}", "", done.stdout.decode()))
    assert len(printed) == 1
    assert "fault: " in printed.pop()


SLOW = {"grants_that_nobody_takes", "payloads_are_kept_after_the_journal"}
"""Rules whose breach takes many runs to show."""


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=[pytest.mark.slow] * (rule in SLOW)) for rule in MUTATIONS]
)
def test_a_broken_rule_is_found_soon(rule: str) -> None:
    with MUTATIONS[rule](), pytest.raises(SeedError, match="play it again"):
        simulate_all(range(SOON))
