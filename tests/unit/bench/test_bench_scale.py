"""The bench of one queue's reach: its costs are measured, and runs are simulated with them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from asyncrl.twin.times import QueueTimes
from bench.scale.__main__ import JOBS, PAYLOAD_BROKERS, queue_times, simulated, table
from bench.scale.costs import costs

COSTS = {"group_s": 1e-4, "byte_s": 1e-9, "request_s": 5e-5, "heartbeat_s": 5e-5, "poll_s": 1e-4}


def test_costs_become_the_times_of_a_queue() -> None:
    """A heartbeat every 2 s and with each group; a rank that waits repeats its claim every 0.5 s."""
    expected = QueueTimes(
        group_s=1.5e-4, byte_s=1e-9, request_s=5e-5, generator_share=2.5e-5, rank_share=2e-4
    )
    assert asdict(queue_times(COSTS)) == pytest.approx(asdict(expected))


def test_payload_brokers_take_work_from_a_queue_that_has_too_much() -> None:
    slow = QueueTimes(byte_s=2e-5)
    rows = list(simulated(slow, JOBS[:1], [(20, 4)]))
    assert [row["payload_brokers"] for row in rows] == list(PAYLOAD_BROKERS)
    alone, *_, several = rows
    assert alone["queue_busy"] == pytest.approx(1.0, abs=0.1)
    assert alone["of_a_free_queue"] < 0.8
    assert several["of_a_free_queue"] > alone["of_a_free_queue"] + 0.2
    assert several["queue_busy"] == 0.0
    lines = table(COSTS, rows, 1).splitlines()
    assert "| a group without its payload | 100 µs |" in lines
    assert sum("short answers" in line for line in lines) == len(rows)


@pytest.mark.slow
def test_the_costs_of_a_real_queue_are_above_0(tmp_path: Path) -> None:
    found = costs(tmp_path, scale=0.1)
    assert {*found} == {*COSTS}
    assert min(found["group_s"], found["byte_s"], found["heartbeat_s"], found["poll_s"]) > 0
