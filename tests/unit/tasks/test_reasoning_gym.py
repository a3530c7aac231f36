from __future__ import annotations

from itertools import pairwise

import pytest
from reasoning_gym.factory import DATASETS, create_dataset

from asyncrl.config.schema import Config
from asyncrl.config.sections.tasks import TasksConfig
from asyncrl.errors import ConfigError
from asyncrl.queue.wire.wire import task_from_wire, task_to_wire
from asyncrl.tasks.reasoning_gym import heldout, reward, tasks
from asyncrl.tasks.source import training_tasks
from asyncrl.tasks.stream import TaskStream
from asyncrl.types import Scored, Task


def stream(*, system: str | None = None, **options: object) -> TaskStream:
    source = "asyncrl.tasks.reasoning_gym:tasks"
    return training_tasks(Config(tasks=TasksConfig(source=source, options=options, system=system)))


def answered(task: Task, answer: str) -> Scored:
    return reward(task, f"I think it is\n<answer>{answer}</answer>")


def test_the_right_answer_is_worth_1_a_wrong_one_less_and_none_0() -> None:
    task = stream(datasets=["chain_sum"], seed=3).task_at(0)
    right = answered(task, task.data["answer"])
    assert (right.parts, right.answer) == (1.0, task.data["answer"])
    assert float(answered(task, "no number").parts) < 1  # type: ignore[arg-type]
    assert reward(task, task.data["answer"]) == Scored(0.0)


def test_data_sets_come_by_weight_and_settings_reach_them() -> None:
    many = stream(
        datasets={"chain_sum": 3, "leg_counting": 1}, configs={"chain_sum": {"min_terms": 2, "max_terms": 2}}
    )
    found = [many.task_at(ordinal) for ordinal in range(200)]
    sums = [task for task in found if "chain_sum" in task.data["metadata"]]
    assert 120 < len(sums) < 180
    assert all("'num_terms': 2" in task.data["metadata"] for task in sums)


def test_tasks_depend_on_the_seed_and_no_two_are_the_same() -> None:
    one, again, other = (stream(datasets=["chain_sum"], seed=seed) for seed in (0, 0, 1))
    prompts = [one.task_at(ordinal).prompt for ordinal in range(20)]
    assert prompts == [again.task_at(ordinal).prompt for ordinal in range(20)]
    assert prompts != [other.task_at(ordinal).prompt for ordinal in range(20)]
    assert all(a != b for a, b in pairwise(prompts))


def test_a_system_prompt_leaves_the_question_to_the_scorer() -> None:
    task = stream(datasets=["letter_jumble"], system="Be brief.").task_at(0)
    assert isinstance(task.prompt, list)
    assert answered(task, task.data["answer"]).parts == 1.0


def test_held_out_tasks_are_not_those_of_training() -> None:
    trained, others = tasks(["leg_counting"], seed=0), tasks(["leg_counting"], seed=1)
    known = {trained[i]["prompt"] for i in range(200)}
    assert (
        sum(others[i]["prompt"] in known for i in range(100)) == 100
    )  # seeds that are near share their tasks
    apart = heldout(["leg_counting"])
    assert len(apart) == 500
    assert not known & {apart[i]["prompt"] for i in range(100)}


@pytest.mark.slow
def test_every_data_set_reaches_its_scorer_unchanged() -> None:
    for name in sorted(set(DATASETS) - {"composite"}):
        made = create_dataset(name, seed=1, size=10)  # what `tasks` makes of seed 0
        row, entry = tasks([name], size=10)[0], made[0]
        task = task_from_wire(task_to_wire(Task(0, row.pop("prompt"), row)))
        answer = task.data["answer"] or "none"
        assert task.prompt == entry["question"], name
        assert answered(task, answer).parts == pytest.approx(made.score_answer(answer, entry)), name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"datasets": ["chain_sums"]}, "chain_sums is none of reasoning-gym's data sets"),
        (
            {"datasets": ["chain_sum"], "configs": {"leg_counting": {}}},
            "leg_counting is none of the datasets",
        ),
        ({"datasets": ["chain_sum"], "configs": {"chain_sum": {"min_terms": -1}}}, "min_terms"),
        ({"datasets": ["chain_sum"], "configs": {"chain_sum": {"terms": 1}}}, "terms"),
    ],
)
def test_what_reasoning_gym_does_not_know_is_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        stream(**options)
