"""Functions of the user's whose arguments do not fit are refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.functions.signatures import check_arguments
from asyncrl.config.schema import RewardConfig
from asyncrl.config.yaml_values import parse_yaml
from asyncrl.errors import ConfigError
from asyncrl.generator.scoring.reward_calls import load_reward
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.types import Rollout, Task

HERE = "test_signatures"
NONE = np.zeros(0)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


def plain(task: Any, text: str) -> float:
    return 1.0


def of_rollout(task: Any, text: str, rollout: Any) -> float:
    return 1.0


def anything(*words: Any) -> float:
    return 1.0


def with_option(task: Any, text: str, *, longest: int) -> float:
    return 1.0


def text_alone(text: str) -> float:
    return 1.0


def too_many(task: Any, text: str, rollout: Any, more: Any) -> float:
    return 1.0


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str == ground_truth and data_source == "math" and extra_info == {"index": 3})


def of_trl(prompts: list[Any], completions: list[str], answer: list[str], **others: Any) -> list[float]:
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


class Scores:
    def __call__(self, task: Any, text: str) -> float:
        return 1.0


class ScoresNothing:
    def __call__(self) -> float:
        return 1.0


def refusal(name: str, **keys: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_reward(RewardConfig(function=f"{HERE}:{name}", **keys), "reward")
    assert caught.value.key == "reward.function"
    return caught.value


@pytest.mark.parametrize("name", ["plain", "of_rollout", "anything", "Scores"])
def test_what_takes_a_task_and_a_text_is_a_reward(name: str) -> None:
    assert callable(load_reward(RewardConfig(function=f"{HERE}:{name}"), "reward"))


def test_an_option_that_is_given_is_no_argument_that_lacks() -> None:
    load_reward(RewardConfig(function=f"{HERE}:with_option", options={"longest": 3}), "reward")
    assert "longest" in refusal("with_option").rule


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("text_alone", "is called with (task, text) or (task, text, rollout), and is text_alone(text"),
        ("too_many", "too_many(task"),
        ("ScoresNothing", "ScoresNothing()"),
    ],
)
def test_what_does_not_is_refused_with_what_it_takes(name: str, says: str) -> None:
    assert says in refusal(name).rule


def test_per_group_speaks_of_texts() -> None:
    assert "(task, texts)" in refusal("text_alone", per="group").rule


TASK = Task(
    0, "1+1=", {"data_source": "math", "ground_truth": "2", "extra_info": {"index": 3}, "answer": "2"}
)


@pytest.mark.parametrize(("name", "trainer"), [("compute_score", "verl"), ("of_trl", "TRL")])
async def test_the_remedy_for_a_function_of_another_trainer_works(name: str, trainer: str) -> None:
    error = refusal(name)
    assert f"is a reward function of {trainer}" in error.rule
    keys = parse_yaml(error.remedy.removeprefix("set reward to "))
    scorer = Scorer.from_config(RewardConfig(**keys))
    scores = await scorer.score_group(TASK, ["2", "3"], [Rollout(NONE, NONE, NONE, NONE, "stop")] * 2)
    assert [score.reward for score in scores] == [1.0, 0.0]


def test_a_class_that_scores_groups_is_refused_for_single_rollouts() -> None:
    config = RewardConfig(function="asyncrl.rewards:Trl", options={"function": f"{HERE}:of_trl"})
    with pytest.raises(ConfigError, match=r"^reward\.per = 'rollout'.*set reward\.per=group"):
        load_reward(config, "reward")


def test_other_functions_are_compared_with_how_they_are_called() -> None:
    check_arguments(plain, "a.py:plain", "algorithm.own_loss", "terms", "config")
    with pytest.raises(ConfigError, match=r"is called with \(batch, config, context\), and takes \(task"):
        check_arguments(plain, "a.py:plain", "algorithm.own_advantage", "batch", "config", "context")


@pytest.mark.parametrize(
    ("source", "says", "remedy"),
    [
        ("import nothing_like_this", "line 1", "install nothing_like_this, or take its import out of"),
        (
            "def reward(task, text): pass\nx = 1 / 0",
            "ZeroDivisionError: division by zero, rewards.py line 2",
            "correct ",
        ),
        ("def reward(:", "SyntaxError", "shows the whole traceback"),
    ],
)
def test_a_file_that_fails_is_not_taken_for_a_wrong_name(
    tmp_path: Path, source: str, says: str, remedy: str
) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(source)
    with pytest.raises(ConfigError) as caught:
        load_function(f"{file}:reward", "reward.function")
    assert says in caught.value.rule
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("spec", "says"),
    [("gone.py:reward", "there is no file gone.py"), ("gone.module:reward", "there is no module gone")],
)
def test_what_is_not_there_is_said_to_be_missing(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_function(spec, "reward.function")


def test_a_file_whose_function_is_named_like_a_module_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward.py").write_text("def reward(task, text): return 1.0\n")
    with pytest.raises(ConfigError, match=r"did you mean my_reward.py:reward\?"):
        load_function("my_reward.reward", "reward.function")


def test_the_remedy_for_a_builtin_does_not_define_it_anew() -> None:
    with pytest.raises(ConfigError, match=r"write def reward\(task, text\)"):
        load_reward(RewardConfig(function="builtins:len"), "reward")
