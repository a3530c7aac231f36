"""From what a reward function returns to the reward that is trained on."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.generator.scoring.scores import Score, score_of
from asyncrl.types import Scored, Step

numbers = st.integers(-100, 100).map(lambda n: n / 4)


def test_a_number_is_its_own_only_part() -> None:
    assert score_of(0.5, "", {}) == Score(0.5, {"reward": 0.5})
    assert score_of({}, "", {}) == Score(0.0, {})  # an environment gives the reward: env.of_the_environment
    assert score_of(True, "", {"reward": 3.0}) == Score(3.0, {"reward": 1.0})


def test_parts_count_by_their_weight_and_are_logged_as_they_came() -> None:
    parts = {"right": 1, "cost": 3, "short": 0.25}
    assert score_of(parts, "", {}).reward == 4.25
    assert score_of(parts, "", {"cost": 0.0, "short": -2.0, "unknown": 9.0}) == Score(
        0.5, {"right": 1.0, "cost": 3.0, "short": 0.25}
    )


def test_the_steps_are_a_part_of_their_own() -> None:
    scored = Scored({"right": 1.0}, [Step(0, 1, 0.5, "a"), Step(2, 3, -0.25)])
    assert score_of(scored, "abc", {"steps": 2.0}) == Score(
        1.5, {"right": 1.0, "steps": 0.25}, (Step(0, 1, 1.0, "a"), Step(2, 3, -0.5))
    )


def test_no_steps_and_an_empty_list_of_them_differ() -> None:
    assert score_of(Scored(1.0), "", {}) == Score(1.0, {"reward": 1.0}, None)
    assert score_of(Scored(1.0, []), "", {}) == Score(1.0, {"reward": 1.0, "steps": 0.0}, ())


@given(
    st.dictionaries(st.sampled_from("abcd"), numbers, min_size=1),
    st.dictionaries(st.sampled_from("abcd"), numbers),
)
def test_the_reward_is_the_weighted_sum(parts: dict[str, float], weights: dict[str, float]) -> None:
    score = score_of(parts, "", weights)
    assert score.reward == sum(parts[name] * weights.get(name, 1) for name in parts)
    assert score.parts == parts


@given(st.lists(numbers, max_size=9), numbers, numbers)
def test_weighted_steps_and_the_other_parts_add_up(steps: list[float], weight: float, rest: float) -> None:
    told = [Step(at, at + 1, reward) for at, reward in enumerate(steps)]
    score = score_of(Scored(rest, told), "x" * 9, {"steps": weight})
    assert score.steps is not None
    assert score.reward == rest + sum(step.reward for step in score.steps)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), "reward is not a finite number"),
        ({"a": 1, "b": float("-inf")}, "b is not a finite number"),
        (1.1e30, "reward is not a finite number from -1e\\+30 to 1e\\+30"),
        ({"a": 6e29, "b": 6e29}, "the weighted sum is not a finite number"),
        ("1.5", "str is no number"),
        (b"3", "bytes is no number"),
        ({"a": "2"}, "str is no number"),
        (Scored(1.0, [Step(0, 1, "2")]), "str is no number"),  # type: ignore[arg-type]
        ({1: 0.5, "1": 0.5}, "the name of a part must be a text, not 1"),
        (Scored({"steps": 1.0}, [Step(0, 1)]), "a part may not be called 'steps' beside steps"),
        (Scored(1.0, [Step(0, 9)]), "step 0"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(value: object, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        score_of(value, "abc", {})


@pytest.mark.parametrize("value", [np.float32(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2)])
def test_numbers_of_numpy_and_torch_are_numbers(value: object) -> None:
    assert score_of(value, "", {}).reward == 0.5
