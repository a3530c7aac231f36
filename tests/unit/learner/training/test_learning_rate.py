"""Learning rates by hand: warm-up, the three curves, and what lies beyond the last step."""

from __future__ import annotations

import math

import pytest

from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.learner.training.accumulator import learning_rate


def rates(schedule: str, warmup: int, steps: int, share: float = 0.1) -> list[float]:
    config = OptimizerConfig(lr=2.0, warmup_steps=warmup, schedule=schedule, min_lr_ratio=share)
    return [learning_rate(step, steps, config) for step in range(steps + 1)]


def test_the_cosine_falls_slowly_then_fast_then_slowly() -> None:
    """After two steps of warm-up, a quarter of half a turn each."""
    quarter = (1 + math.sqrt(0.5)) / 2
    expected = [0.5, 1.0, 0.1 + 0.9 * quarter, 0.1 + 0.9 / 2, 0.1 + 0.9 * (1 - quarter), 0.1, 0.1]
    assert rates("cosine", 2, 6) == pytest.approx([2 * rate for rate in expected])


def test_the_line_falls_evenly_to_its_end_and_stays_there() -> None:
    assert rates("linear", 2, 6) == pytest.approx([1.0, 2.0, 1.55, 1.1, 0.65, 0.2, 0.2])


def test_a_constant_rate_only_warms_up() -> None:
    assert rates("constant", 4, 6) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_without_a_warm_up_the_first_step_has_the_whole_rate(schedule: str, warmup: int) -> None:
    found = rates(schedule, warmup, 5, share=0.0)
    assert (found[0], found[2], found[4]) == pytest.approx((2.0, 1.0, 0.0))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_run_of_one_step_has_the_whole_rate(schedule: str) -> None:
    assert rates(schedule, 0, 1)[0] == 2.0
