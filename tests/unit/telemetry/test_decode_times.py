"""The line through an engine's decode steps, against a fit by numpy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.telemetry.decode_times import DecodeTimes


def of(steps: list[tuple[int, float]]) -> DecodeTimes:
    times = DecodeTimes()
    for sequences, seconds in steps:
        times = times.with_step(sequences, seconds)
    return times


@given(
    st.floats(0.0, 0.1),
    st.floats(1e-5, 0.01),
    st.lists(st.integers(1, 512), min_size=2, max_size=30).filter(lambda n: np.std(n) > 0.1 * np.mean(n)),
)
def test_the_line_of_steps_without_noise_is_found(
    step_s: float, sequence_s: float, sequences: list[int]
) -> None:
    line = of([(n, step_s + sequence_s * n) for n in sequences]).line()
    assert line == pytest.approx((step_s, sequence_s), rel=1e-3, abs=1e-6)


def test_steps_with_noise_have_the_line_of_least_squares() -> None:
    random = np.random.default_rng(0)
    n = random.integers(1, 256, 200)
    seconds = 0.01 + 1e-4 * n + random.normal(0, 1e-3, 200)
    slope, offset = np.polyfit(n, seconds, 1)
    assert of([*zip(n.tolist(), seconds.tolist(), strict=True)]).line() == pytest.approx((offset, slope))


def test_neither_part_is_below_0() -> None:
    assert of([(10, 0.3), (20, 0.1)]).line() == pytest.approx((0.2, 0.0))
    step_s, sequence_s = of([(10, 0.1), (20, 0.4)]).line() or (1.0, 0.0)
    assert (step_s, sequence_s) == pytest.approx((0.0, (10 * 0.1 + 20 * 0.4) / 500))


def test_steps_of_about_as_many_sequences_tell_no_line() -> None:
    assert of([(256, 0.1), (250, 0.1), (256, 0.2)]).line() is None
    assert DecodeTimes().line() is None


def test_sums_of_engines_add_up_and_travel_as_stats() -> None:
    first, second = of([(1, 0.1), (2, 0.2)]), of([(8, 0.5)])
    assert sum([first, second], DecodeTimes()) == pytest.approx(of([(1, 0.1), (2, 0.2), (8, 0.5)]))
    assert DecodeTimes.of_stats({"tokens": 3.0, **first.stats()}) == first
    assert DecodeTimes.of_stats({"tokens": 3.0}).line() is None
