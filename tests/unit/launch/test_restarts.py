"""Limits and pauses of restarts, by hand and by property."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.launch.restarts import LONGEST_PAUSE_S, Restart, Restarts


def test_the_first_restart_comes_at_once_and_pauses_double() -> None:
    restarts = Restarts(window_s=1000.0, pause_s=2.0)
    planned = [restarts.plan("g", "g", 9, now=10.0 * i) for i in range(7)]
    assert [one.at - 10.0 * i for i, one in enumerate(planned)] == [
        0,
        2,
        4,
        8,
        16,
        LONGEST_PAUSE_S,
        LONGEST_PAUSE_S,
    ]
    assert [one.number for one in planned] == [1, 2, 3, 4, 5, 6, 7]


def test_processes_share_a_limit_and_pause_each_for_itself() -> None:
    restarts = Restarts(window_s=100.0, pause_s=2.0)
    assert restarts.plan("a", "pools", 2, now=0.0) == Restart(0.0, 1, over=False)
    assert restarts.plan("b", "pools", 2, now=1.0) == Restart(1.0, 2, over=False)
    assert restarts.plan("b", "pools", 2, now=5.0) == Restart(100.0, 2, over=True)


def test_what_lies_before_the_window_counts_no_more() -> None:
    restarts = Restarts(window_s=100.0, pause_s=2.0)
    for now in (0.0, 40.0):
        assert not restarts.plan("g", "g", 2, now).over
    assert restarts.plan("g", "g", 2, now=99.0) == Restart(100.0, 2, over=True)
    assert restarts.plan("g", "g", 2, now=120.0) == Restart(142.0, 2, over=True)
    assert restarts.plan("g", "g", 2, now=300.0) == Restart(300.0, 1, over=False)


def test_without_restarts_there_is_none() -> None:
    assert Restarts(100.0, 1.0).plan("g", "g", 0, now=5.0) == Restart(math.inf, 0, over=True)


def test_who_is_due_is_started_once() -> None:
    restarts, started = Restarts(100.0, 1.0), list[str]()
    restarts.put("late", 9.0, lambda: started.append("late"))
    restarts.put("soon", 5.0, lambda: started.append("soon"))
    assert (restarts.until_next(4.0, 3.0), restarts.until_next(4.0, 0.5)) == (1.0, 0.5)
    assert (restarts.start_due(4.0), restarts.start_due(5.0), restarts.start_due(8.0)) == ([], ["soon"], [])
    assert restarts.waits("late")
    restarts.clear()
    assert restarts.start_due(99.0) == []
    assert started == ["soon"]


@given(
    st.lists(st.floats(0.0, 50.0), max_size=60),
    st.integers(1, 4),
    st.floats(1.0, 100.0),
    st.floats(0.0, 10.0),
)
def test_no_window_has_more_restarts_than_there_may_be(
    lives: list[float], most: int, window_s: float, pause_s: float
) -> None:
    """A process that dies after each of `lives`, and is started when it may be."""
    restarts, now, starts = Restarts(window_s, pause_s), 0.0, list[float]()
    for life in lives:
        now += life
        restart = restarts.plan("g", "g", most, now)
        assert restart.at >= now
        now = restart.at
        starts.append(now)
    for first, last in zip(starts, starts[most:], strict=False):
        assert last - first >= window_s * (1 - 1e-9)
