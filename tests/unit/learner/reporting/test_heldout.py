"""mean@k, pass@k and maj@k, and how chunks of an evaluation add up to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.sections.tasks import EvaluationConfig
from asyncrl.learner.reporting.evaluation import Evaluation, Evaluations
from asyncrl.learner.reporting.heldout import majority_at, pass_at, scores
from asyncrl.types import ANSWER, Group, Rollout, Sampling, Task


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_right_one(
    right: list[bool], data: Any
) -> None:
    k = data.draw(st.integers(1, len(right)))
    choices = list(combinations(right, k))
    expected = sum(any(choice) for choice in choices) / len(choices)
    assert pass_at(np.array([right]), k) == pytest.approx(expected)


def test_pass_at_k_is_averaged_over_tasks() -> None:
    # c = 1 and c = 0 of K = 4: (1 − C(3,2)/C(4,2) + 0) / 2
    assert pass_at(np.array([[1, 0, 0, 0], [0, 0, 0, 0]], bool), 2) == 0.25


@pytest.mark.parametrize(
    ("right", "answers", "majority"),
    [
        ([1, 1, 0, 0], [1, 1, 2, 3], 1.0),
        ([1, 0, 0, 0], [1, 2, 2, 3], 0.0),
        ([1, 1, 0, 0], [1, 1, 2, 2], 0.5),  # a tie shares the task
        ([1, 0, 0, 0], [1, 0, 0, 0], 1.0),  # three do not vote
        ([1, 0, 0, 0], [0, 0, 0, 0], 0.0),  # nobody votes
        ([1, 0, 0, 0], [1, 1, 2, 3], 0.5),  # one answer, judged in two ways
    ],
)
def test_the_majority_of_answers(right: list[int], answers: list[int], majority: float) -> None:
    assert majority_at(np.array([right], bool), np.array([answers], float)) == majority


def test_what_is_reported_depends_on_the_samples_and_on_answers() -> None:
    rewards, none = np.array([[1.0, 0.5, 0, 0, 0, 0]], np.float32), np.zeros((1, 6))
    assert scores(rewards[:, :1], none[:, :1], none[:, :1], 1.0) == {"accuracy": 1.0, "unscored": 0.0}
    made = scores(rewards, none, none, 1.0)
    assert list(made) == ["accuracy", "unscored", "pass@2", "pass@4", "pass@6"]
    assert made == {
        "accuracy": 0.25,
        "unscored": 0.0,
        "pass@2": pytest.approx(1 / 3),
        "pass@4": pytest.approx(2 / 3),
        "pass@6": 1.0,
    }
    assert scores(rewards, none, none, 0.5)["pass@2"] == pytest.approx(1 - 6 / 15)
    assert scores(rewards, np.array([[1, 2, 2, 0, 0, 0]]), none, 1.0)["maj@6"] == 0.0


def test_answers_without_a_score_are_counted_beside_the_accuracy_that_they_lower() -> None:
    rewards, answers = np.array([[1.0], [0], [0]], np.float32), np.zeros((3, 1))
    unscored = np.array([[0.0], [1], [1]], np.float32)
    assert scores(rewards, answers, unscored, 1.0) == {"accuracy": pytest.approx(1 / 3), "unscored": 2.0}


@dataclass
class FakeClient:
    """Takes what fits, and hands in the groups that it is given."""

    fits: int = 100
    asked: list[tuple[Task, int]] = field(default_factory=list)
    done: list[Group] = field(default_factory=list)

    def room(self, stream: str, wait_s: float) -> tuple[int, int]:
        return len(self.asked), self.fits - len(self.asked)

    def submit(self, stream: str, tasks: Sequence[Task], min_version: int = 0) -> None:
        self.asked += [(task, min_version) for task in tasks]

    def collect(self, stream: str, *, learner_epoch: int, wait_s: float) -> list[Group]:
        done, self.done = self.done, []
        return done


MATH = {"source": "math.jsonl", "samples": 2, "temperature": 1.0}
CONFIG = EvaluationConfig(source="main.jsonl", chunk=4, sets={"math": MATH})


def evaluations(client: FakeClient, config: EvaluationConfig = CONFIG, **sizes: int) -> Evaluations:
    return Evaluations(client, 7, {"": 6, **sizes}, config)  # type: ignore[arg-type]


def chunk(task: Task, rewards: list[float], answers: list[int] | None = None) -> Group:
    ids = np.array([1, 2])
    made = np.array([0.0, -1], np.float32), np.array([-1, 0], np.int32)
    parts = [{} if answers is None else {ANSWER: float(answer)} for answer in answers or rewards]
    rollouts = [
        Rollout(ids, np.array([0, 1], np.int8), *made, "stop", reward, of)
        for reward, of in zip(rewards, parts, strict=True)
    ]
    return Group.from_rollouts(task, Sampling(), rollouts)


def test_sets_go_out_in_chunks_of_so_many_answers() -> None:
    client = FakeClient()
    evaluations(client, math=3).start(5)
    assert [(t.data["set"], t.data["start"], t.data["stop"]) for t, _ in client.asked] == [
        ("", 0, 4),
        ("", 4, 6),
        ("math", 0, 2),
        ("math", 2, 3),
    ]
    assert {version for _, version in client.asked} == {5}


def test_an_evaluation_is_whole_when_all_chunks_of_all_sets_are_in() -> None:
    client = FakeClient()
    made = evaluations(client, math=3)
    made.start(5)
    first, second, third, fourth = (task for task, _ in client.asked)
    client.done = [
        chunk(fourth, [1, 0]),
        chunk(second, [1, 0]),
        chunk(third, [0, 1, 0, 0], [1, 2, 1, 1]),
        chunk(third, [1, 1, 1, 1], [1, 1, 1, 1]),  # once more: it counts once
    ]
    assert made.poll() == []
    assert made.pending == [5]
    client.done = [chunk(first, [1, 1, 1, 0])]
    (whole,) = made.poll()
    assert whole == Evaluation(
        5,
        {
            "eval/accuracy": pytest.approx(4 / 6),
            "eval/unscored": 0.0,
            "eval/math/accuracy": pytest.approx(2 / 6),
            "eval/math/unscored": 0.0,
            "eval/math/pass@2": pytest.approx(2 / 3),
            "eval/math/maj@2": pytest.approx(0.5 / 3),  # the first task's two answers tie
        },
    )
    assert made.pending == []


def test_an_evaluation_that_overtakes_another_waits_for_it() -> None:
    client = FakeClient()
    made = evaluations(client, EvaluationConfig(source="main.jsonl", chunk=6))
    for version in (0, 5, 10):
        made.start(version)
    oldest, middle, newest = (task for task, _ in client.asked)
    client.done = [chunk(newest, [1] * 6), chunk(middle, [0] * 6)]
    assert made.poll() == []
    assert made.pending == [0, 5, 10]
    client.done = [chunk(oldest, [1] * 6)]
    assert [whole.version for whole in made.poll()] == [0, 5, 10]
    assert made.pending == []


def test_what_is_whole_behind_a_missing_evaluation_is_not_lost_at_the_end() -> None:
    client = FakeClient()
    made = evaluations(client, EvaluationConfig(source="main.jsonl", chunk=6))
    for version in (0, 5, 10):
        made.start(version)
    _, middle, newest = (task for task, _ in client.asked)
    client.done = [chunk(newest, [1] * 6), chunk(middle, [0] * 6)]
    assert made.poll() == []
    assert [whole.version for whole in made.rest()] == [5, 10]
    assert made.pending == [0]


def test_chunks_wait_for_room() -> None:
    client = FakeClient(fits=2)
    made = evaluations(client, math=3)
    made.start(0)
    assert len(client.asked) == 2
    client.fits = 3
    made.poll()
    assert len(client.asked) == 3


def test_a_task_with_more_samples_than_a_chunk_is_a_chunk_of_its_own() -> None:
    client = FakeClient()
    config = EvaluationConfig(source="main.jsonl", samples=8, temperature=1.0, chunk=4)
    evaluations(client, config).start(0)
    assert [task.data["stop"] for task, _ in client.asked] == [1, 2, 3, 4, 5, 6]


def test_the_trace_has_an_evaluation_from_its_start_until_it_is_whole(trace: Any) -> None:
    client = FakeClient()
    made = evaluations(client, math=3)
    made.start(5)
    assert not trace().lanes
    first, second, third, fourth = (task for task, _ in client.asked)
    client.done = [chunk(first, [1, 0, 0, 0]), chunk(second, [1, 0]), chunk(third, [0, 1, 0, 0])]
    made.poll()
    client.done = [chunk(fourth, [1, 0])]
    made.poll()
    (span,) = trace().lanes["evaluation"].spans
    assert span.about["version"] == 5
    assert span.about["eval/accuracy"] == pytest.approx(1 / 3)
