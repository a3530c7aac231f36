"""What processes of one run compare, and what they say where they differ."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import VERSION
from asyncrl.config.config_consistency import (
    AGREED,
    ASIDE,
    agreed,
    check_agreed,
    check_with_learner,
    one_sided,
    posted,
)
from asyncrl.config.load import all_keys
from asyncrl.config.schema import BatchConfig, Config, GeneratorConfig, ModelConfig, RunConfig, TeacherConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig, TeacherLossConfig
from asyncrl.config.sections.placement import PlaceConfig, PlacementConfig
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.errors import ConfigError

CONFIG = Config(
    run=RunConfig(name="it"),
    model=ModelConfig(path="a"),
    reward=RewardConfig(function="a.py:right", weights={"b": 2.0, "a": 1.0}),
)


def with_(section: str, **values: object) -> Config:
    """CONFIG with other values in one section."""
    return dataclasses.replace(
        CONFIG,
        **{section: dataclasses.replace(getattr(CONFIG, section), **values)},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        with_("run", dir="/elsewhere", versions=7, resume=True),
        with_("generator", slots=512, threads=3, devices="1,2", count=2, engine="vllm"),
        with_("queue", address="tcp://127.0.0.1:5", max_bytes=1),
        with_("sync", host="127.0.0.7", deadline_s=9.0),
        with_("reward", workers=64),
        with_("reward", weights={"a": 1.0, "b": 2.0}),
    ],
)
def test_what_may_differ_from_machine_to_machine_is_not_compared(config: Config) -> None:
    check_agreed(agreed(CONFIG), config)


@pytest.mark.parametrize(
    ("config", "key", "learners", "ours"),
    [
        (with_("batch", group_size=2), "batch.group_size", "8", "2"),
        (with_("generator", heartbeat_s=9.0), "generator.heartbeat_s", "2.0", "9.0"),
        (with_("generator", temperature=0.5), "generator.temperature", "1.0", "0.5"),
        (with_("reward", function="b.py:none"), "reward.function", '"a.py:right"', '"b.py:none"'),
        (with_("reward", weights={"a": 1.0}), "reward.weights", '{"a": 1.0, "b": 2.0}', '{"a": 1.0}'),
        (with_("run", seed=1), "run.seed", "0", "1"),
        (with_("model", path="b"), "model.path", '"a"', '"b"'),
        (with_("tasks", system="Be brief."), "tasks.system", "null", '"Be brief."'),
        (with_("algorithm", filter="no_spread"), "algorithm.filter", '"none"', '"no_spread"'),
        (
            with_("placement", rewards=dataclasses.replace(PlacementConfig().rewards, where="pool")),
            "placement.rewards.where",
            '"colocated"',
            '"pool"',
        ),
    ],
)
def test_a_difference_is_named_with_both_values(config: Config, key: str, learners: str, ours: str) -> None:
    told = re.escape(f"{key} is {learners} at the learner and {ours} here")
    with pytest.raises(ConfigError, match=told) as caught:
        check_agreed(agreed(CONFIG), config)
    assert (caught.value.key, caught.value.value) == (key, ours)
    assert "asyncrl queue --anew" in caught.value.remedy


OTHERWISE = {
    "run.seed": 1,
    "model.path": "b",
    "model.dtype": "bfloat16",
    "model.head_dtype": "float32",
    "generator.heartbeat_s": 9.0,
    "generator.max_length": 777,
    "generator.max_tokens": 7,
    "generator.temperature": 0.5,
    "generator.top_p": 0.5,
    "generator.top_k": 5,
    "generator.min_p": 0.1,
    "generator.quantization": "int8",
    "algorithm.advantage": "rloo",
    "algorithm.own_advantage": "a.py:mine",
    "algorithm.filter": "no_spread",
}
"""Of the sections that are compared in part: every key that decides what is trained, and another value of it."""

WHOLE = ("tasks", "evaluation", "reward", "agent", "batch", "critic", "reference", "reward_model", "teacher")
"""Sections whose keys decide what is trained, all but for the number of processes that do it."""

OF_THE_MACHINE = {
    "reward.workers",
    "reward.max_failed_share",
    "agent.tool_workers",
    "agent.environment_processes",
    "agent.environment_python",
    "agent.gateway.host",
    "agent.gateway.port",
    "agent.gateway.remote",
}
"""These only decide how fast a process works, or when it gives up."""


@pytest.mark.parametrize("key", OTHERWISE)
def test_every_key_that_decides_what_is_trained_is_compared(key: str) -> None:
    section, name = key.split(".")
    config = with_("algorithm", truncated="weigh")  # which top_k and its like need
    before, after = getattr(getattr(config, section), name), OTHERWISE[key]
    assert before != after
    other = dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **{name: after})}
    )
    with pytest.raises(ConfigError, match=re.escape(f"one run, but {key} is {json.dumps(before)} at ")):
        check_agreed(agreed(config), other)


def test_so_are_whole_sections_and_the_places_of_models() -> None:
    keys = {key for key in all_keys() if key.partition(".")[0] in WHOLE} - OF_THE_MACHINE
    keys |= {key for key in all_keys() if key.startswith("placement.") and key.endswith(".where")}
    keys |= {key for key in all_keys() if key.startswith("model.lora.")} - {"model.lora.path"}
    keys |= {*OTHERWISE, "placement.rewards.functions"}
    keys |= {"algorithm.teacher_loss.form", "algorithm.teacher_loss.top_k"}
    assert len(keys) > len(OTHERWISE)
    assert keys == agreed(CONFIG).keys() - {"asyncrl"}


def test_so_is_what_a_teacher_on_a_pool_gives() -> None:
    def taught(form: Any, top_k: int) -> Config:
        algorithm = AlgorithmConfig(teacher_loss=TeacherLossConfig(1.0, form, top_k))
        return dataclasses.replace(CONFIG, algorithm=algorithm, teacher=TeacherConfig("other"))

    learners = agreed(taught("topk", 32))
    with pytest.raises(ConfigError, match=r"algorithm\.teacher_loss\.top_k is 32 at "):
        check_agreed(learners, taught("topk", 8))
    with pytest.raises(ConfigError, match=r"algorithm\.teacher_loss\.form is \"topk\" at "):
        check_agreed(learners, taught("k2", 32))


def test_all_differences_are_named_at_once() -> None:
    config = dataclasses.replace(
        CONFIG, batch=BatchConfig(group_size=2), generator=GeneratorConfig(temperature=0.5)
    )
    with pytest.raises(ConfigError, match=r"batch\.group_size is 8 .* generator\.temperature is 1\.0"):
        check_agreed(agreed(CONFIG), config)


def test_so_is_another_version_of_the_package() -> None:
    with pytest.raises(ConfigError, match=r"asyncrl is 0\.0\.1 at the learner and"):
        check_agreed({**agreed(CONFIG), "asyncrl": "0.0.1"}, CONFIG)


def test_a_long_value_differs_by_its_end() -> None:
    one, other = with_("tasks", system="a" * 500 + "b"), with_("tasks", system="a" * 500 + "c")
    assert len(agreed(one)["tasks.system"]) < 300
    check_agreed(agreed(one), one)
    with pytest.raises(ConfigError, match=r"tasks\.system"):
        check_agreed(agreed(one), other)


def test_of_a_pool_only_its_place_is_compared() -> None:
    here = with_("placement", critic=PlaceConfig(where="pool", devices="1", threads=3, deadline_s=9.0))
    check_agreed(agreed(with_("placement", critic=PlaceConfig(where="pool"))), here)


def test_so_it_is_of_a_users_own_model() -> None:
    on_pool, learners = PlacementConfig(own={"near": {"where": "pool", "threads": 3}}), PlacementConfig()
    pool = dataclasses.replace(CONFIG, placement=on_pool)
    with pytest.raises(ConfigError, match=r'placement\.own\.near\.where is \(none\) at .* "pool"'):
        check_agreed(agreed(dataclasses.replace(CONFIG, placement=learners)), pool)
    other = PlacementConfig(own={"near": {"where": "pool", "devices": "1"}, "idle": {}})
    check_agreed(agreed(dataclasses.replace(CONFIG, placement=other)), pool)


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION


class FakeRegistry:
    async def lookup(self, key: str, wait_s: float) -> dict[str, str]:
        assert key == AGREED
        return posted(CONFIG)


async def test_of_a_key_that_one_side_uses_the_other_is_told_whose_value_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = with_("queue", max_staleness=7, fsync=True)
    for _ in range(2):
        await check_with_learner(FakeRegistry(), here, 1.0)
    assert caplog.messages == [
        "queue.max_staleness is 2 at the learner, whose value counts; 7 here does nothing"
    ]
    await check_with_learner(FakeRegistry(), here, 1.0, queue=True)
    assert caplog.messages[1:] == [
        "queue.fsync is true here at the queue, whose value counts; false at the learner does nothing"
    ]


def test_every_key_of_the_queue_and_the_algorithm_has_a_side_that_counts() -> None:
    told = posted(CONFIG)
    left = {key for key in all_keys() if key not in told and ASIDE + key not in told}
    of_each_process = {"queue.address", "queue.keys", "queue.deadline_s"}
    assert {key for key in left if key.startswith(("queue.", "algorithm.", "checkpoint."))} == of_each_process
    assert list(one_sided(told, CONFIG, queue=True)) == []
