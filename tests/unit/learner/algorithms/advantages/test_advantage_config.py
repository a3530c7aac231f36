"""What the configuration refuses of advantages and reward shaping, and by which key."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncrl.config.schema import BatchConfig, Config, GeneratorConfig
from asyncrl.config.sections.algorithm import GROUP_ADVANTAGES, AlgorithmConfig, ShapingConfig
from asyncrl.errors import ConfigError


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
