"""The number of samples of an engine: by hand, and as a property."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.generator.sample_limit import SampleLimit


@pytest.mark.parametrize(
    ("slots", "group", "under_way", "room"),
    [
        (8, 2, 0, 5),  # 8 slots and a lead of 2 samples
        (8, 2, 9, 0),
        (8, 2, 8, 1),
        (8, 8, 0, 2),  # the lead is one group at least
        (8, 8, 1, 1),
        (100, 8, 0, 15),  # 125 samples
        (100, 8, 60, 8),
    ],
)
def test_slots_and_a_lead_are_filled(slots: int, group: int, under_way: int, room: int) -> None:
    assert SampleLimit(slots, group).groups_wanted(under_way) == room


def test_a_preemption_cuts_what_was_under_way_and_calm_brings_groups_back() -> None:
    limit = SampleLimit(64, 4)
    assert limit.samples == 80
    limit.observe(40, kv_usage=1.0, preemptions=2)
    assert (limit.samples, limit.groups_wanted(30), limit.groups_wanted(27)) == (30, 0, 0)
    limit.observe(30, kv_usage=0.95, preemptions=2)  # nobody lost anything, and no memory to spare
    assert limit.samples == 30
    for samples in (34, 38):
        limit.observe(30, kv_usage=0.8, preemptions=2)
        assert limit.samples == samples
    limit.observe(38, kv_usage=0.99, preemptions=3)
    assert limit.samples == 28.5


def test_an_engine_that_is_started_again_counts_its_preemptions_from_0() -> None:
    limit = SampleLimit(64, 4)
    limit.observe(80, 1.0, 5)
    limit.observe(60, 0.5, 0)
    assert limit.samples == 64
    limit.observe(64, 0.5, 1)
    assert limit.samples == 48


@given(
    st.integers(1, 300),
    st.integers(1, 16),
    st.lists(st.tuples(st.integers(0, 400), st.floats(0, 1), st.integers(0, 3)), max_size=40),
)
def test_one_group_always_has_room_and_the_lead_is_never_passed(
    slots: int, group: int, looks: list[tuple[int, float, int]]
) -> None:
    limit, preemptions = SampleLimit(slots, group), 0
    most = limit.samples
    for under_way, usage, more in looks:
        preemptions += more
        limit.observe(under_way, usage, preemptions)
        assert group <= limit.samples <= most
        assert limit.groups_wanted(0) >= 1


def test_memory_for_half_of_the_slots_is_found_and_kept_to() -> None:
    """An engine that pre-empts above 50 samples: the limit saws below it instead of growing to 160."""
    limit, preemptions, limits = SampleLimit(128, 4), 0, []
    for _ in range(200):
        under_way = int(limit.samples)
        preemptions += max(0, under_way - 50)
        limit.observe(under_way, min(1.0, under_way / 50), preemptions)
        limits.append(limit.samples)
    assert max(limits[20:]) <= 54
    assert min(limits[20:]) >= 0.7 * 50
