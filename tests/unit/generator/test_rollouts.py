"""From a task to a scored group, on an engine that remembers what it was asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from generator_cases import Letters

from asyncrl.config.schema import (
    BatchConfig,
    Config,
    EvaluationConfig,
    GeneratorConfig,
    RewardConfig,
    RunConfig,
    TasksConfig,
    TeacherConfig,
)
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.engines.engine import PromptTooLongError, SampleRequest
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.scoring.rewards import RewardError, Scorer
from asyncrl.learner.algorithms.registry import ADVANTAGES
from asyncrl.types import ANSWER, UNSCORED, Sampling, Scored, Step, Task, Turn

TASK = Task(4, "1+1=", {"answer": "2"})
LETTERS = "abcdefgh"


@dataclass
class Spy:
    """Sample i of n answers with the i-th letter; a greedy one says 'G'."""

    asked: list[SampleRequest] = field(default_factory=list)

    async def sample(self, request: SampleRequest) -> list[Turn]:
        self.asked.append(request)
        greedy = request.sampling.temperature == 0
        return [self._turn(request, "G" if greedy else letter) for letter in LETTERS[: request.n]]

    def _turn(self, request: SampleRequest, text: str) -> Turn:
        ids = np.array([ord(letter) for letter in text])
        made = np.full(len(ids), -0.5, np.float32), np.zeros(len(ids), np.int32)
        return Turn(request.prompt_ids, ids, *made, "stop")


def rollouts(spy: Any, reward: Callable[..., Any], weights: Any = None, **algorithm: Any) -> Rollouts:
    config = Config(
        batch=BatchConfig(group_size=3),
        generator=GeneratorConfig(max_tokens=5, temperature=0.7),
        evaluation=EvaluationConfig(max_tokens=2),
        reward=RewardConfig(function="unused:unused", weights=weights or {}, retries=0),
        algorithm=AlgorithmConfig(**algorithm),
    )
    return Rollouts(spy, Letters(), Scorer(reward, config.reward), config)  # type: ignore[arg-type]


async def by_letter(task: Task, text: str) -> float:
    return {"a": 1.0, "b": 2.0, "c": 3.0, "G": 10.0}[text]


async def test_a_task_becomes_a_group() -> None:
    spy = Spy()
    made = rollouts(spy, by_letter)
    group = await made.score(TASK, await made.sample(TASK, "r"))
    (request,) = spy.asked
    assert (request.request_id, request.n, request.sampling.temperature) == ("r", 3, 0.7)
    assert group.rewards.tolist() == [1.0, 2.0, 3.0]
    assert group.greedy_reward is None
    assert group.columns == {}


async def test_remax_gets_the_reward_of_one_greedy_rollout_and_nothing_else_of_it() -> None:
    spy = Spy()
    made = rollouts(spy, by_letter, weights={"reward": 0.5}, advantage="remax")
    group = await made.score(TASK, await made.sample(TASK, "r"))
    assert [(r.request_id, r.n, r.sampling.temperature) for r in spy.asked] == [
        ("r", 3, 0.7),
        ("r/greedy", 1, 0.0),
    ]
    assert {(r.ordinal, r.sampling.max_tokens) for r in spy.asked} == {(4, 5)}
    assert group.greedy_reward == 5.0
    assert group.rewards.tolist() == [0.5, 1.0, 1.5]
    assert (group.tokens, group.sampling.temperature) == (3 * 5, 0.7)


async def test_a_reward_of_the_group_sees_all_answers_of_a_task() -> None:
    def order(task: Task, texts: list[str]) -> list[float]:
        return [float("abc".index(text) * len(texts)) for text in texts]

    config = Config(
        batch=BatchConfig(group_size=3), reward=RewardConfig(function="unused:unused", per="group")
    )
    made = Rollouts(Spy(), Letters(), Scorer(order, config.reward), config)  # type: ignore[arg-type]
    assert (await made.score(TASK, await made.sample(TASK, "r"))).rewards.tolist() == [0.0, 3.0, 6.0]


async def test_a_greedy_rollout_that_cannot_be_scored_drops_the_task() -> None:
    async def picky(task: Task, text: str) -> float:
        if text == "G":
            raise KeyError("G")
        return 1.0

    made = rollouts(Spy(), picky, advantage="remax")
    samples = await made.sample(TASK, "r")
    with pytest.raises(RewardError, match="KeyError: 'G'"):
        await made.score(TASK, samples)


async def test_steps_for_some_rollouts_only_drop_the_task() -> None:
    async def sometimes(task: Task, text: str) -> Scored:
        return Scored(1.0, [] if text == "b" else None)

    made = rollouts(Spy(), sometimes)
    samples = await made.sample(TASK, "r")
    with pytest.raises(RewardError, match="task 4 gave steps for some rollouts and not for others"):
        await made.score(TASK, samples)


async def test_steps_reach_the_group_but_no_evaluation() -> None:
    async def stepwise(task: Task, text: str) -> Scored:
        return Scored({"right": 1.0}, [Step(0, 1, 0.5)])

    made = rollouts(Spy(), stepwise)
    group = await made.score(TASK, await made.sample(TASK, "r"))
    assert group.columns["step"].reshape(3, 5).tolist() == [[-1, -1, -1, -1, 0]] * 3
    assert group.reward_parts["steps"].tolist() == [0.5, 0.5, 0.5]
    evaluated = await made.evaluate(TASK, [TASK, TASK], "e")
    assert evaluated.columns == {}
    assert evaluated.rewards.tolist() == [1.5, 1.5]


async def test_held_out_tasks_that_cannot_be_scored_or_asked_count_as_0() -> None:
    class Narrow(Spy):
        async def sample(self, request: SampleRequest) -> list[Turn]:
            if len(request.prompt_ids) > 4:
                raise PromptTooLongError("too long")
            return await super().sample(request)

    async def picky(task: Task, text: str) -> Scored:
        if task.ordinal == 1:
            raise KeyError("no answer")
        return Scored(1.0, [])

    held_out = [Task(0, "1+1="), Task(1, "1+1="), Task(2, "1+1+1=")]
    group = await rollouts(Narrow(), picky, advantage="remax").evaluate(TASK, held_out, "e")
    assert group.rewards.tolist() == [1.0, 0.0, 0.0]
    assert group.reward_parts[UNSCORED].tolist() == [0.0, 1.0, 1.0]
    assert group.lengths.tolist() == [5, 5, 6]


def exams(spy: Any, reward: Callable[..., Any], **reward_keys: Any) -> Rollouts:
    """Three samples of each task of the set 'hard', greedy ones of the others."""
    hard = {"source": "hard.jsonl", "samples": 3, "temperature": 0.6, "top_p": 0.9, "max_tokens": 4}
    config = Config(
        evaluation=EvaluationConfig(source="main.jsonl", max_tokens=2, sets={"hard": hard}),
        reward=RewardConfig(function="unused:unused", retries=0, **reward_keys),
        run=RunConfig(seed=5),
    )
    return Rollouts(spy, Letters(), Scorer(reward, config.reward), config)  # type: ignore[arg-type]


async def test_each_evaluation_set_is_sampled_its_own_way() -> None:
    async def constant(task: Task, text: str) -> float:
        return 1.0

    spy = Spy()
    made = exams(spy, constant)
    hard = await made.evaluate(TASK, [Task(0, "1+1="), Task(1, "1+2=")], "e", "hard")
    main = await made.evaluate(TASK, [Task(0, "1+1=")], "f")
    assert [(r.request_id, r.n, r.ordinal) for r in spy.asked] == [
        ("e/0", 3, 0),
        ("e/1", 3, 1),
        ("f/0", 1, 0),
    ]
    assert hard.sampling == Sampling(temperature=0.6, max_tokens=4, seed=5, top_p=0.9)
    assert main.sampling == Sampling(temperature=0.0, max_tokens=2, seed=5)
    assert (hard.rewards.tolist(), main.rewards.tolist()) == ([1.0] * 6, [1.0])
    assert ANSWER not in hard.reward_parts


async def test_answers_of_a_task_that_agree_have_one_number() -> None:
    async def reads(task: Task, text: str) -> Scored:
        answer = None if text == "c" else "same" if task.ordinal == 0 else text
        return Scored(float(text == "a"), answer=answer)

    held_out = [Task(0, "1+1="), Task(1, "1+2=")]
    group = await exams(Spy(), reads).evaluate(TASK, held_out, "e", "hard")
    assert group.rewards.tolist() == [1.0, 0.0, 0.0] * 2
    assert group.reward_parts[ANSWER].tolist() == [1.0, 1.0, 0.0, 1.0, 2.0, 0.0]


async def test_a_reward_of_the_group_sees_all_samples_of_a_held_out_task() -> None:
    async def count(task: Task, texts: list[str]) -> list[float]:
        return [float(len(texts))] * len(texts)

    group = await exams(Spy(), count, per="group").evaluate(TASK, [TASK, TASK], "e", "hard")
    assert group.rewards.tolist() == [3.0] * 6


async def test_a_held_out_task_that_cannot_be_scored_counts_as_0_with_all_its_samples() -> None:
    async def picky(task: Task, text: str) -> float:
        if (task.ordinal, text) == (0, "b"):
            raise KeyError("b")
        return 1.0

    group = await exams(Spy(), picky).evaluate(TASK, [Task(0, "1+1="), Task(1, "1+2=")], "e", "hard")
    assert group.rewards.tolist() == [0.0] * 3 + [1.0] * 3


async def test_a_prompt_longer_than_the_setting_is_not_asked() -> None:
    config = Config(tasks=TasksConfig(max_prompt_tokens=4), evaluation=EvaluationConfig(source="main.jsonl"))
    spy = Spy()
    made = Rollouts(spy, Letters(), Scorer(by_letter, config.reward), config)  # type: ignore[arg-type]
    with pytest.raises(PromptTooLongError, match=r"5 tokens is longer than tasks\.max_prompt_tokens=4"):
        await made.sample(Task(0, "1+12="), "r")
    assert spy.asked == []
    assert len((await made.sample(TASK, "r")).played) == 8


async def test_an_answer_is_sampled_as_in_training_without_a_greedy_one() -> None:
    spy = Spy()
    assert await rollouts(spy, by_letter, advantage="remax").answer(TASK, "p") == "a"
    assert [(r.n, r.sampling.temperature) for r in spy.asked] == [(1, 0.7)]


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_greedy_rollout_is_made_for_the_algorithms_that_need_one(name: str) -> None:
    config = Config(
        # Some go with one loss only; an own loss goes with all.
        algorithm=AlgorithmConfig(advantage=name, own_loss="any:loss"),  # type: ignore[arg-type]
        teacher=TeacherConfig(path="there"),
        reward=RewardConfig(weights={"cost": 0.0}),
    )
    assert config.greedy_rollout == ("greedy" in ADVANTAGES[name].needs)


def test_a_filter_that_would_drop_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^algorithm.filter = 'no_spread': would drop every group"):
        Config(
            batch=BatchConfig(group_size=1),
            algorithm=AlgorithmConfig(advantage="gae", own_advantage="my:own", filter="no_spread"),
        )
