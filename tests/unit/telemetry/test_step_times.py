"""The line through an engine's decode steps, against a fit by numpy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.telemetry.step_times import DECODE, PREFILL, StepTimes


def of(steps: list[tuple[int, float]]) -> StepTimes:
    times = StepTimes()
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
    assert (step_s, sequence_s) == pytest.approx((0.0, (0.1 + 0.4) / (10 + 20)))


def test_steps_of_about_as_many_sequences_have_no_line() -> None:
    assert of([(256, 0.1), (250, 0.1), (256, 0.2)]).line() is None
    assert StepTimes().line() is None


def test_sums_of_engines_add_up_and_travel_as_stats() -> None:
    first, second = of([(1, 0.1), (2, 0.2)]), of([(8, 0.5)])
    assert sum([first, second], StepTimes()) == pytest.approx(of([(1, 0.1), (2, 0.2), (8, 0.5)]))
    assert StepTimes.of_stats(DECODE, {"tokens": 3.0, **first.stats(DECODE)}) == first
    assert StepTimes.of_stats(DECODE, {"tokens": 3.0}).line() is None
    assert StepTimes.of_stats(PREFILL, first.stats(DECODE)) == StepTimes()


def test_without_a_line_there_is_one_from_a_given_height() -> None:
    alike = of([(8, 0.1), (8, 0.2)])
    assert alike.line_from(0.05) == pytest.approx((0.05, 0.0125))
    assert alike.line_from(0.4) == pytest.approx((0.4, 0.0))
    assert of([(10, 0.03), (20, 0.05)]).line_from(0.02) == pytest.approx((0.01, 0.002))
    assert StepTimes().line_from(0.02) == (0.0, 0.0)
