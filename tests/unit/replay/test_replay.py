"""Runs that cannot be made again are refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.replay.replay import check_keys, check_learner, check_rollouts, recorded_lives
from asyncrl.telemetry.decisions import DecisionLog

CONFIG = """
model: {path: model}
tasks: {source: tasks.jsonl}
reward: {function: "asyncrl.tasks.addition:reward"}
"""


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (["generator.engine=vllm"], "generator.engine"),
        (["generator.own_engine=mine.py:engine"], "generator.engine"),
        (["placement.generators.small.engine=vllm"], "placement.generators.small.engine"),
        (["placement.reference.where=pool", "algorithm.shaping.kl_coef=0.1"], "placement"),
        (["placement.rewards.where=pool"], "placement"),
        (["agent.program=python play.py"], "agent"),
    ],
)
def test_a_run_that_decides_elsewhere_is_refused_by_key(tmp_path: Path, keys: list[str], key: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    for config in (load_config(path), load_config(path, keys)):
        check_learner(config)  # that part can be made again from saved groups
    check_rollouts(load_config(path))
    with pytest.raises(ConfigError, match=r"--saved-groups.* asyncrl bisect RUN RUN") as refused:
        check_rollouts(load_config(path, keys))
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (["learner.processes=2"], "learner.processes"),
        (["placement.critic.where=pool", "algorithm.advantage=gae"], "placement"),
    ],
)
def test_a_learner_that_is_not_one_process_is_refused_by_key(
    tmp_path: Path, keys: list[str], key: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    with pytest.raises(ConfigError, match="asyncrl bisect RUN RUN") as refused:
        check_learner(load_config(path, keys))
    assert refused.value.key == key


def test_other_rules_are_those_of_the_learners_step() -> None:
    check_keys(["algorithm.loss=gspo", "learner.optimizer.lr=1e-4", "reference.update_every=3"])
    with pytest.raises(ConfigError, match="only the rules of the learner's step") as refused:
        check_keys(["algorithm.loss=gspo", "batch.group_size=3"])
    assert refused.value.key == "batch.group_size"


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "decisions").mkdir()
    (tmp_path / "decisions" / "learner.0.msgpack").write_bytes(b"\x93\x01\x02\x03")
    with pytest.raises(ConfigError, match="that no process wrote, or that was changed"):
        recorded_lives(tmp_path)


def test_a_record_of_another_form_is_refused(tmp_path: Path) -> None:
    log = DecisionLog(
        tmp_path / "decisions", "learner", {"format": 99, "role": "learner", "config": "c.yaml"}
    )
    log.close()
    with pytest.raises(
        ConfigError, match=r"learner\.0 recorded its decisions in format 99, this asyncrl reads 1"
    ):
        recorded_lives(tmp_path)
