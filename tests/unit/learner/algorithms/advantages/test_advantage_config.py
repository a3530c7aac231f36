"""What the configuration refuses of advantages and reward shaping, and by which key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from learner_cases import rewards_batch

from asyncrl.config.schema import BatchConfig, Config, GeneratorConfig
from asyncrl.config.sections.algorithm import (
    FLAT_WITHOUT_SPREAD,
    GROUP_ADVANTAGES,
    AlgorithmConfig,
    KlLossConfig,
    ShapingConfig,
    TeacherLossConfig,
)
from asyncrl.errors import ConfigError
from asyncrl.learner.algorithms.advantages import advantages
from asyncrl.learner.algorithms.registry import ADVANTAGES, AlgorithmContext


@pytest.mark.parametrize("literal", GROUP_ADVANTAGES)
def test_groups_of_one_are_refused_where_rollouts_are_compared(literal: str) -> None:
    with pytest.raises(ConfigError, match=r"batch\.group_size = 1: advantage '.*' compares"):
        Config(batch=BatchConfig(group_size=1), algorithm=AlgorithmConfig(advantage=literal))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "make"),
    [
        ("algorithm.gamma", lambda: Config(algorithm=AlgorithmConfig(gamma=1.5))),
        ("algorithm.lam", lambda: Config(algorithm=AlgorithmConfig(lam=-0.1))),
        ("algorithm.vapo_alpha", lambda: Config(algorithm=AlgorithmConfig(vapo_alpha=0.0))),
        ("algorithm.hgpo_history", lambda: Config(algorithm=AlgorithmConfig(hgpo_history=-1))),
        ("algorithm.cost_multiplier", lambda: Config(algorithm=AlgorithmConfig(cost_multiplier=-1.0))),
        ("algorithm.cost_multiplier", lambda: Config(algorithm=AlgorithmConfig(cost_multiplier=6.0))),
        ("algorithm.pass_k", lambda: Config(algorithm=AlgorithmConfig(pass_k=1))),
        (
            "algorithm.filter",
            lambda: Config(algorithm=AlgorithmConfig(advantage="distill", filter="no_spread")),
        ),
        (
            "algorithm.pass_k",
            lambda: Config(algorithm=AlgorithmConfig(pass_k=9), batch=BatchConfig(group_size=8)),
        ),
        (
            "algorithm.shaping.resample_power",
            lambda: Config(algorithm=AlgorithmConfig(shaping=ShapingConfig(resample_power=0.0))),
        ),
        (
            "algorithm.shaping.kl_coef",
            lambda: Config(algorithm=AlgorithmConfig(shaping=ShapingConfig(kl_coef=-0.1))),
        ),
        (
            "algorithm.shaping.kl_coef",
            lambda: Config(algorithm=AlgorithmConfig(shaping=ShapingConfig(kl_target=0.1))),
        ),
        (
            "algorithm.shaping.overlong_buffer",
            lambda: Config(
                algorithm=AlgorithmConfig(shaping=ShapingConfig(overlong_buffer=9)),
                generator=GeneratorConfig(max_tokens=8),
            ),
        ),
    ],
)
def test_a_refusal_names_its_key(key: str, make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as refusal:
        make()
    assert refusal.value.key == key
    assert refusal.value.remedy.startswith("set ")


LEARN_FROM_FLAT = sorted(ADVANTAGES.keys() - {*FLAT_WITHOUT_SPREAD})


@pytest.mark.parametrize("literal", LEARN_FROM_FLAT)
def test_the_filter_is_refused_where_groups_without_spread_teach_something(literal: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^algorithm\.filter = 'no_spread': .*Remedy: set algorithm\.filter=none"
    ):
        Config(algorithm=AlgorithmConfig(advantage=literal, filter="no_spread"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("term", "algorithm"),
    [
        ("loss=sppo", {"loss": "sppo"}),
        ("loss=dro", {"loss": "dro"}),
        ("kl_loss.coef", {"kl_loss": KlLossConfig(coef=0.1)}),
        ("teacher_loss.coef", {"teacher_loss": TeacherLossConfig(coef=0.1)}),
        ("shaping.kl_coef", {"shaping": ShapingConfig(kl_coef=0.1)}),
        ("entropy_bonus", {"entropy_bonus": -0.1}),
        ("lm_coef", {"lm_coef": 0.1}),
    ],
)
def test_the_filter_is_refused_beside_terms_that_look_at_no_reward(
    term: str, algorithm: dict[str, Any]
) -> None:
    with pytest.raises(
        ConfigError, match=rf"^algorithm\.filter = .*from which algorithm\.{term} learns as well"
    ):
        Config(algorithm=AlgorithmConfig(filter="no_spread", **algorithm))


@pytest.mark.parametrize(
    "literal", sorted({*FLAT_WITHOUT_SPREAD} - {"prime", "reinforce_pp_baseline", "gdpo"})
)
def test_the_advantages_that_the_filter_goes_with_are_0_without_spread(literal: str) -> None:
    batch = rewards_batch([1.0, 1.0, 1.0], [0.0, 1.0, 0.5])
    algorithm = AlgorithmConfig(advantage=literal, filter="no_spread", pass_k=2)  # type: ignore[arg-type]
    found_N = advantages(batch, algorithm, AlgorithmContext())
    assert found_N[batch.group_R[batch.seq_N] == 0].tolist() == [0.0] * 6
    assert found_N.any()
