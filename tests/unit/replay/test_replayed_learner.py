"""A recorded learner that was begun anew from a checkpoint, and its replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import DivergedError
from asyncrl.learner.reporting.version_decisions import mark_of, weights_hash
from asyncrl.replay.replayed_learner import OpenLearner, Replayed, ReplayedLearner
from asyncrl.replay.stores import GroupStore, Published, WeightStore
from asyncrl.telemetry.decisions import ClaimedGroup, Life, TrainedVersion
from asyncrl.types import Group, Rollout, Sampling, Task

CONFIG = """
model: {{path: {model}}}
tasks: {{source: asyncrl.tasks.addition:train}}
reward: {{function: "asyncrl.tasks.addition:reward"}}
batch: {{groups: 2, group_size: 4}}
learner: {{threads: 1, optimizer: {{lr: 1e-2}}}}
"""
ABOUT = {"role": "learner"}


def group(ordinal: int) -> Group:
    rng = np.random.default_rng(ordinal)
    rollouts = [
        Rollout(
            token_ids=rng.integers(1, 20, 6),
            loss_mask=np.array([0, 0, 1, 1, 1, 1], np.int8),
            logprobs=np.array([0, 0, -3, -3, -3, -3], np.float32),
            versions=np.array([-1, -1, 0, 0, 0, 0], np.int32),
            finish="stop",
            reward=float(reward),
        )
        for reward in rng.random(4)
    ]
    return Group.from_rollouts(Task(ordinal, "1+1="), Sampling(), rollouts)


GROUPS = [group(ordinal) for ordinal in range(6)]
CLAIMS = {1: [GROUPS[:1], GROUPS[1:2]], 2: [GROUPS[2:4]], 3: [GROUPS[4:]]}


def claimed(claims: Sequence[Sequence[Group]]) -> list[list[ClaimedGroup]]:
    return [[ClaimedGroup(one.task.ordinal, mark_of(one)) for one in claim] for claim in claims]


def trained(learner: OpenLearner, version: int) -> TrainedVersion:
    report = learner.train(CLAIMS[version], version - 1)
    norm = report.values["train/grad_norm"]
    return TrainedVersion(version, False, weights_hash(learner.backend), norm, claimed(CLAIMS[version]))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Config:
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(CONFIG.format(model=model_folder))
    return load_config(path)


@pytest.fixture(scope="module")
def lives(config: Config, tmp_path_factory: pytest.TempPathFactory) -> list[Life]:
    """The first life trains 1 and 2 and saves 1; the second one goes on from there."""
    saved = tmp_path_factory.mktemp("states") / "v1"
    learner = OpenLearner(config, None)
    first = [("threads", 1), ("begun", 0, 1, weights_hash(learner.backend))]
    first += [tuple(trained(learner, 1).to_wire()), ("saved", 1)]
    learner.save(saved)
    first += [tuple(trained(learner, 2).to_wire())]
    learner.backend.close()
    learner = OpenLearner(config, saved)
    second = [("threads", 1), ("begun", 1, 2, weights_hash(learner.backend))]
    second += [tuple(trained(learner, version).to_wire()) for version in (2, 3)]
    learner.backend.close()
    return [Life("learner", 0, ABOUT, first), Life("learner", 1, ABOUT, second)]


def replayed(
    lives: Sequence[Life], config: Config, folder: Path, groups: Sequence[Group] = GROUPS, **rules: Any
) -> tuple[ReplayedLearner, GroupStore, WeightStore]:
    steps = [TrainedVersion.from_wire(item) for life in lives for item in life.items if item[0] == "trained"]
    store = GroupStore(one for step in steps for claim in step.claims for one in claim)
    for one in groups:
        store.put(one)
    weights = WeightStore([Published(1, 0), Published(1, 2), Published(2, 1)])
    return (
        ReplayedLearner([(life, config) for life in lives], folder, store, weights, **rules),
        store,
        weights,
    )


def changed(lives: Sequence[Life], life: int, at: int, item: tuple[Any, ...]) -> list[Life]:
    items = [item if number == at else was for number, was in enumerate(lives[life].items)]
    return [replace(one, items=items) if number == life else one for number, one in enumerate(lives)]


def test_all_lives_come_to_their_weights(lives: list[Life], config: Config, tmp_path: Path) -> None:
    learner, _, weights = replayed(lives, config, tmp_path)
    made = [*learner.advance()]
    assert [(one.recorded.version, one.lineage, one.same) for one in made] == [
        (1, 1, True),
        (2, 1, True),
        (2, 2, True),
        (3, 2, True),
    ]
    assert learner.ended
    assert all(weights.has(one) for one in (Published(1, 0), Published(1, 2), Published(2, 1)))
    learner.close()


def test_it_waits_for_its_groups(lives: list[Life], config: Config, tmp_path: Path) -> None:
    learner, store, _ = replayed(lives, config, tmp_path, GROUPS[:3])
    assert [one.recorded.version for one in learner.advance()] == [1]
    assert learner.lacks == ClaimedGroup(3, mark_of(GROUPS[3]))
    store.put(GROUPS[3])
    assert [one.recorded.version for one in learner.advance()] == [2, 2]
    learner.close()


def test_other_weights_are_found_and_explained(lives: list[Life], config: Config, tmp_path: Path) -> None:
    was = TrainedVersion.from_wire(lives[0].items[2])
    texts = {}
    for name, other in {
        "weights": replace(was, weights=1),
        "norm": replace(was, weights=1, norm=0.5),
    }.items():
        learner, *_ = replayed(changed(lives, 0, 2, tuple(other.to_wire())), config, tmp_path)
        made = next(learner.advance())
        assert not made.same
        texts[name] = made.difference
        learner.close()
    assert texts["weights"] == (
        f"the gradient norm is the recorded one, and the weights hash to {was.weights:016x}, not {1:016x}"
    )
    assert texts["norm"] == f"the gradient norm is {was.norm!r}, and was 0.5"


def test_a_step_that_was_refused_is_not_published(lives: list[Life], config: Config, tmp_path: Path) -> None:
    was = TrainedVersion.from_wire(lives[0].items[2])
    refused = changed(lives, 0, 2, tuple(replace(was, refused=True).to_wire()))
    learner, *_ = replayed(refused, config, tmp_path)
    with pytest.raises(DivergedError, match="the step to version 1 was refused in the run, and is made here"):
        [*learner.advance()]
    learner.close()


def test_a_life_from_a_version_that_no_life_saved_is_refused(
    lives: list[Life], config: Config, tmp_path: Path
) -> None:
    learner, *_ = replayed(lives[1:], config, tmp_path)
    with pytest.raises(DivergedError, match=r"learner\.1 began with version 1, and no decisions are there"):
        [*learner.advance()]
    learner.close()


def test_a_second_learner_trains_by_other_rules_and_publishes_nothing(
    lives: list[Life], config: Config, tmp_path: Path
) -> None:
    slower = replace(
        config, learner=replace(config.learner, optimizer=replace(config.learner.optimizer, lr=1e-3))
    )
    learner, *_ = replayed(lives, config, tmp_path, otherwise=[slower, slower])
    made: list[Replayed] = [*learner.advance()]
    assert all(one.same for one in made)
    rates = [
        (one.otherwise.values["train/lr"], one.report.values["train/lr"]) for one in made if one.otherwise
    ]
    assert [slow / fast for slow, fast in rates] == pytest.approx([0.1] * 4)
    first, again = made[1], made[2]  # both learners went back to version 1
    assert first.otherwise is not None
    assert again.otherwise is not None
    assert first.otherwise.values["train/loss"] == again.otherwise.values["train/loss"]
    learner.export(tmp_path / "final")
    assert (tmp_path / "final" / "config.json").is_file()
    learner.close()
