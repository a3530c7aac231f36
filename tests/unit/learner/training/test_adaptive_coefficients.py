"""The coefficients that a run adapts."""

from __future__ import annotations

import math

import pytest

from asyncrl.config.sections.algorithm import AlgorithmConfig, ShapingConfig
from asyncrl.learner.training.experience import AdaptiveCoefficients

ADAPTIVE = AlgorithmConfig(shaping=ShapingConfig(kl_coef=0.1, kl_target=0.5, kl_horizon=100))
FIXED = AlgorithmConfig(shaping=ShapingConfig(kl_coef=0.1))
SAFE = AlgorithmConfig(advantage="safe_rlhf", cost_multiplier=2.0, cost_lr=0.1, cost_limit=0.5)


def test_the_kl_coefficient_follows_the_mean_kl_of_the_version() -> None:
    start = AdaptiveCoefficients.start(ADAPTIVE)
    assert start.adapted(ADAPTIVE) == {"kl_coef": 0.1}
    # A KL of 0.55 is 10 % above the target; 20 rollouts of a horizon of 100.
    assert start.after({"train/kl/reward": 0.55, "train/rollouts": 20.0}, ADAPTIVE).kl_coef == pytest.approx(
        0.1 * 1.02
    )
    assert start.after({"train/kl/reward": 9.0, "train/rollouts": 20.0}, ADAPTIVE).kl_coef == pytest.approx(
        0.1 * 1.04
    )


def test_the_multiplier_grows_while_the_mean_cost_is_above_the_limit() -> None:
    start = AdaptiveCoefficients.start(SAFE)
    after = start.after({"rollout/reward/part/cost": 1.5}, SAFE)
    assert after.cost_multiplier == pytest.approx(2.0 * math.exp(0.1 * 2.0 * 1.0))
    assert start.after({"rollout/reward/part/cost": 0.0}, SAFE).cost_multiplier < 2.0
    assert after.adapted(SAFE) == {"cost_multiplier": after.cost_multiplier}


def test_what_is_fixed_stays_as_configured() -> None:
    start = AdaptiveCoefficients.start(FIXED)
    assert start.after({}, FIXED) == start
    assert start.adapted(FIXED) == {}
    assert start.restored({"kl_coef": 0.7, "cost_multiplier": 3.0}, FIXED) == start


def test_what_adapts_is_restored() -> None:
    moved = AdaptiveCoefficients.start(SAFE).after({"rollout/reward/part/cost": 1.5}, SAFE)
    assert AdaptiveCoefficients.start(SAFE).restored(moved.adapted(SAFE), SAFE) == moved
    assert AdaptiveCoefficients.start(SAFE).restored({}, SAFE) == AdaptiveCoefficients.start(SAFE)
