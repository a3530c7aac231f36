"""By which speed a link gets versions, changes, or deflated changes."""

from __future__ import annotations

import math

import pytest

from asyncrl.sync.delta.link_speed import LinkSpeed


@pytest.mark.parametrize(
    ("size", "seconds", "speed", "is_slow", "is_very_slow"),
    [
        (200_000_000, 0.05, math.inf, False, False),
        (400, 0.04, math.inf, False, False),
        (200_000_000, 0.45, 5e8, False, False),
        (200_000_000, 0.55, 4e8, True, False),
        (200_000_000, 8.05, 2.5e7, True, False),
        (200_000_000, 20.05, 1e7, True, True),
    ],
)
def test_the_speed_of_a_full_version_beyond_its_latency(
    size: int, seconds: float, speed: float, is_slow: bool, is_very_slow: bool
) -> None:
    found = LinkSpeed.of(size, seconds)
    assert found.bytes_s == pytest.approx(speed)
    assert (found.is_slow, found.is_very_slow) == (is_slow, is_very_slow)


def test_a_link_that_has_carried_nothing_counts_as_fast() -> None:
    assert not LinkSpeed().is_slow
    assert not LinkSpeed().is_very_slow
