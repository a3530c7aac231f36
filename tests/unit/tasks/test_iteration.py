"""The task with answers of very different lengths: exact answers, a tail, a recipe with room for the longest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl import demo as demos
from asyncrl.config.load import CONFIGS, load_config
from asyncrl.models.loading import load_tokenizer
from asyncrl.rewards.matching import ExactMatch
from asyncrl.tasks.iteration import MOST_STEPS, problem, tasks
from asyncrl.types import Task


def test_an_answer_counts_down_beside_the_numbers() -> None:
    # 21 · 53 + 7 = 1120, 21 · 20 + 7 = 427, 21 · 27 + 7 = 574
    assert problem(53, 3)["answer"] == "0220,0127,0074"
    assert problem(99, 1) == {"prompt": "99*01=", "answer": "0086", "target": "0086"}


def test_the_sequence_visits_every_number_before_one_comes_again() -> None:
    assert len({step[2:] for step in problem(0, 100)["answer"].split(",")}) == 100


@given(number=st.integers(0, 99), steps=st.integers(2, MOST_STEPS))
def test_an_answer_goes_on_as_that_of_its_first_number_does(number: int, steps: int) -> None:
    first, _, rest = problem(number, steps)["answer"].partition(",")
    assert rest == problem(int(first[2:]), steps - 1)["answer"]


def test_lengths_have_a_long_tail() -> None:
    steps = np.sort([row["answer"].count(",") + 1 for row in tasks()])
    assert np.median(steps) == 1
    assert steps[0] == 1
    assert steps[-1] == MOST_STEPS
    for k in (2, 5, 10):
        # k or more: 1/k of all, less those with more than MOST_STEPS.
        expected = (1 / k - 1 / (MOST_STEPS + 1)) / (1 - 1 / (MOST_STEPS + 1))
        assert abs((steps >= k).mean() - expected) < 0.015
    longest = steps[-len(steps) // 20 :]
    assert longest.sum() > 0.25 * steps.sum()


def test_a_seed_gives_the_same_rows_and_another_one_others() -> None:
    assert tasks(count=50) == tasks(count=50)
    assert tasks(count=50) != tasks(count=50, seed=1)


def test_long_tasks_alone() -> None:
    assert min(row["answer"].count(",") + 1 for row in tasks(least_steps=8, count=200)) == 8


def test_one_wrong_digit_or_a_step_less_earns_nothing() -> None:
    row = problem(53, 3)
    task, reward = Task(0, row["prompt"], row), ExactMatch()
    assert reward(task, row["target"]).parts == 1.0
    assert reward(task, "0220,0127,0075").parts == 0.0
    assert reward(task, "0220,0127").parts == 0.0


def test_the_recipe_has_room_for_the_longest_answer(tmp_path: Path) -> None:
    config = load_config(CONFIGS / "recipes" / "iteration.yaml", [f"model.path={tmp_path}"])
    demos.RECIPES["iteration"].write_model(tmp_path, config)
    tokenizer, row = load_tokenizer(config.model), problem(0, MOST_STEPS)
    prompt, answer = (tokenizer.encode(row[name], add_special_tokens=False) for name in ("prompt", "target"))
    assert tokenizer.unk_token_id not in [*prompt, *answer]
    assert len(answer) + 1 == config.generator.max_tokens
    assert len(prompt) + config.generator.max_tokens == config.generator.max_length
    assert config.evaluation.named_sets.keys() == {"", "long"}
