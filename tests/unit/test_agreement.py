"""What processes of one run compare, and what they say where they differ."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from asyncrl.config.agreement import agreed, check_agreed
from asyncrl.config.placement import PlaceConfig, PlacementConfig
from asyncrl.config.reward import RewardConfig
from asyncrl.config.schema import BatchConfig, Config, GeneratorConfig, ModelConfig, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.version import VERSION

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
        with_("generator", slots=512, threads=3, devices="1", count=9, heartbeat_s=9.0, engine="vllm"),
        with_("queue", address="tcp://127.0.0.1:5", max_bytes=1),
        with_("sync", host="10.0.0.7", deadline_s=9.0),
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


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
