"""The layouts that the comparison of weight streams carries, and that its figures stand for what they say."""

from __future__ import annotations

import pytest

from asyncrl.sync.layout.layout import layout_bytes
from asyncrl.sync.plan.plan import plan
from bench.bars import figures, verdicts
from bench.sync import report
from bench.sync.model import LEARNERS, generator_layout, learner_layout, shapes, total_bytes


def test_the_models_are_of_the_size_that_they_are_called() -> None:
    assert total_bytes(100) == pytest.approx(2 * 100e6, rel=0.03)
    assert total_bytes(500) == pytest.approx(2 * 500e6, rel=0.03)
    assert len(shapes(100)) == 218


@pytest.mark.parametrize("world", [1, 2])
def test_two_learner_ranks_hold_each_byte_once_and_can_feed_every_generator_rank(world: int) -> None:
    learners = [learner_layout(1, rank) for rank in range(LEARNERS)]
    assert sum(map(layout_bytes, learners)) == total_bytes(1)
    needed = [generator_layout(1, rank, world) for rank in range(world)]
    assert sum(plan(learners, layout, 1 << 20).bytes for layout in needed) == sum(map(layout_bytes, needed))


def test_a_pause_is_compared_with_the_floor_of_its_own_repetition() -> None:
    repetitions = [
        {"learner_pause_ms": 2.0, "learner_floor_ms": 1.0},
        {"learner_pause_ms": 90.0, "learner_floor_ms": 30.0},
        {"learner_pause_ms": 3.5, "learner_floor_ms": 1.0},
    ]
    found = figures(repetitions, report.BARS)
    assert dict(verdicts(found, report.BARS))["learner_pause_ms / learner_floor_ms ≤ 3"] == "pass: 3"
