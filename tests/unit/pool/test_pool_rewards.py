"""Reward functions on a pool: what they make of groups that come out of the queue."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
from learner_cases import rollout

from asyncrl.config.schema import Config, RewardConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.placement import PlacementConfig, RewardsPlaceConfig
from asyncrl.errors import WireError
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.pool.scoring import Scoring
from asyncrl.pool.worker import LeftOut
from asyncrl.queue.wire.columns import decode_columns, encode_columns, with_columns
from asyncrl.queue.wire.payload import PART
from asyncrl.types import ANSWER, UNSCORED, Array, Group, Rollout, Sampling, Scored, Step, Task

POOL = PlacementConfig(rewards=RewardsPlaceConfig(where="pool"))


HELD_OUT = [Task(ordinal, "12", {"answer": str(ordinal)}) for ordinal in range(5)]


class Digits:
    """A tokenizer of one digit a token."""

    def decode(self, ids: Array, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(str(int(one)) for one in ids)


def scoring(call: Any, kept: str = "none", **reward: Any) -> Scoring:
    """kept: algorithm.filter"""
    section = RewardConfig(**({"function": "unused:unused"} | reward), retries=0)
    algorithm = AlgorithmConfig(filter=kept)  # type: ignore[arg-type]
    config = Config(reward=section, placement=POOL, algorithm=algorithm)
    return Scoring(Scorer(call, section), Digits(), config, {"": HELD_OUT})  # type: ignore[arg-type]


def group_of(*rollouts: Rollout) -> Group:
    return Group.from_rollouts(Task(7, "12", {"answer": "34"}), Sampling(), rollouts)


def scored(work: Scoring, group: Group) -> Group:
    """As it comes out of the queue."""
    columns = asyncio.run(work.columns(group))
    return with_columns(group, decode_columns(encode_columns(columns).frames))


def test_the_reward_is_what_came_and_what_the_pool_adds() -> None:
    def liked(task: Task, text: str) -> float:
        return 0.5 if text == task.data["answer"] else 0.0

    came = group_of(rollout([1, 2, 3, 4], 2, reward=1.0), rollout([1, 2, 5], 2, reward=-1.0))
    found = scored(scoring({"liked": liked}, function=None, functions={"liked": {"function": "a:b"}}), came)
    assert found.rewards.tolist() == [1.5, -1.0]
    assert found.reward_parts["liked"].tolist() == [0.5, 0.0]
    assert found.columns == {}


def test_parts_are_weighed_and_those_that_came_stay() -> None:
    came = group_of(rollout([1, 2, 3], 2), rollout([1, 2, 4], 2))
    came = with_columns(came, {"part/right": np.array([1.0, 0.0], np.float32)})
    work = scoring(lambda task, text: {"long": 2.0, "kind": 1.0}, weights={"long": 0.25})
    found = scored(work, came)
    assert found.rewards.tolist() == [1.5, 1.5]
    assert {name: part.tolist() for name, part in found.reward_parts.items()} == {
        "right": [1.0, 0.0],
        "long": [2.0, 2.0],
        "kind": [1.0, 1.0],
    }


def test_the_text_is_what_the_policy_said_last() -> None:
    texts: list[str] = []

    def note(task: Task, text: str) -> float:
        texts.append(text)
        return 0.0

    turns = rollout([1, 2, 3, 4, 5, 6], 2)
    turns.loss_mask[3] = 0  # what a tool said
    cut_off = rollout([1, 2, 3, 4], 2)
    cut_off.loss_mask[3] = 0
    asyncio.run(scoring(note, workers=1).columns(group_of(turns, cut_off)))
    assert sorted(texts) == ["", "56"]


@pytest.mark.parametrize(
    ("function", "reason", "why"),
    [
        (lambda task, text: 1 / 0, "reward", "ZeroDivisionError"),
        (lambda task, text: Scored(1.0, [Step(0, 1)]), "reward", "steps"),
        (lambda task, text: {"right": 1.0}, "reward", r"both give \['right'\]"),
        (lambda task, text: 1.0, "filtered", "^$"),
    ],
    ids=["fails", "steps", "twice", "no spread"],
)
def test_groups_that_are_left_out(function: Any, reason: str, why: str) -> None:
    came = group_of(rollout([1, 2, 3], 2, reward=1.0), rollout([1, 2, 4], 2, reward=1.0))
    came = with_columns(came, {"part/right": np.zeros(2, np.float32)})
    with pytest.raises(LeftOut, match=why) as left_out:
        asyncio.run(scoring(function, "no_spread").columns(came))
    assert left_out.value.reason == reason


def test_groups_are_filtered_by_their_whole_reward() -> None:
    came = group_of(rollout([1, 2, 3], 2, reward=1.0), rollout([1, 2, 4], 2, reward=1.0))
    found = scored(scoring(lambda task, text: float(text == "3"), "no_spread"), came)
    assert found.rewards.tolist() == [2.0, 1.0]


def test_a_part_of_the_wrong_length_is_refused() -> None:
    came = group_of(rollout([1, 2, 3], 2), rollout([1, 2, 4], 2))
    with pytest.raises(WireError, match=r"'part/right' has the shape \(3,\), the group needs 2 values"):
        with_columns(came, {"part/right": np.zeros(3, np.float32)})


def held_out_group(*rollouts: Rollout, start: int, stop: int) -> Group:
    return Group.from_rollouts(Task(0, "", {"set": "", "start": start, "stop": stop}), Sampling(), rollouts)


def test_held_out_tasks_are_scored_one_by_one_and_one_that_fails_counts_as_0() -> None:
    def right(task: Task, text: str) -> Scored:
        if task.ordinal == 3:
            raise ValueError("nobody knows")
        return Scored(float(text == task.data["answer"]), answer=text)

    answers = [rollout([1, 2, digit], 2, reward=0.25) for digit in (2, 2, 9, 3, 3, 4)]
    group = held_out_group(*answers, start=2, stop=5)  # two samples of each
    work = scoring(right)
    columns = asyncio.run(work.evaluate(group))
    found = with_columns(group, decode_columns(encode_columns(columns).frames))
    assert found.rewards.tolist() == [1.25, 1.25, 0, 0, 0.25, 1.25]
    assert found.reward_parts["reward"].tolist() == [1, 1, 0, 0, 0, 1]
    assert found.reward_parts[UNSCORED].tolist() == [0, 0, 1, 1, 0, 0]
    assert work.stats()["reward/failures"] >= 1
    assert found.reward_parts[ANSWER].tolist() == [1, 1, 0, 0, 1, 2]


def test_what_could_not_be_answered_earns_nothing() -> None:
    unanswered = dataclasses.replace(rollout([1, 2], 2), reward_parts={UNSCORED: 1.0})
    columns = asyncio.run(
        scoring(lambda task, text: 1.0).evaluate(held_out_group(unanswered, start=0, stop=1))
    )
    assert (columns["rewards"].tolist(), columns[f"{PART}{UNSCORED}"].tolist()) == ([0.0], [1.0])
