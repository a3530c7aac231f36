"""Which groups are dropped before they travel."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from learner_cases import rollout

from asyncrl.config.schema import Config, RewardConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.generator.scoring.scores import passes_filter
from asyncrl.types import Group, Sampling, Task


def group_of(*parts: dict[str, float]) -> Group:
    """One rollout for each; its reward is the sum of its parts."""
    made = [dataclasses.replace(rollout([1, 2], 1, sum(p.values())), reward_parts=p) for p in parts]
    return Group.from_rollouts(Task(0, ""), Sampling(), made)


FLAT = group_of({"right": 1.0}, {"right": 1.0})
SPREAD = group_of({"right": 1.0}, {"right": 0.0})
TRADED = group_of({"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0})


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        (AlgorithmConfig(), [True, True, True]),
        (AlgorithmConfig(filter="no_spread"), [False, True, False]),
        (AlgorithmConfig(filter="no_spread", advantage="gdpo"), [False, True, True]),
        (AlgorithmConfig(filter="no_spread", advantage="gdpo", own_advantage="my:own"), [False, True, False]),
    ],
)
def test_a_group_passes_if_what_is_compared_differs(algorithm: AlgorithmConfig, passes: list[bool]) -> None:
    assert [passes_filter(g, Config(algorithm=algorithm)) for g in (FLAT, SPREAD, TRADED)] == passes


def test_a_part_that_is_only_logged_does_not_count() -> None:
    config = Config(
        algorithm=AlgorithmConfig(filter="no_spread", advantage="gdpo"),
        reward=RewardConfig(weights={"length": 0.0}),
    )
    logged = group_of({"right": 1.0, "length": 3.0}, {"right": 1.0, "length": 5.0})
    assert not passes_filter(dataclasses.replace(logged, rewards=np.ones(2, np.float32)), config)
