from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
import torch
from learner_cases import ORACLE, flat, oracle_batch, rewards_batch

from asyncrl.config.schema import AlgorithmConfig
from asyncrl.learner.advantages import ESTIMATORS, advantages


def test_every_literal_has_an_estimator() -> None:
    assert set(get_args(get_type_hints(AlgorithmConfig)["advantage"])) == set(ESTIMATORS)


@pytest.mark.parametrize("literal", ["grpo", "dr_grpo", "rloo"])
def test_agrees_with_the_oracle(literal: str) -> None:
    batch = oracle_batch()
    ours_N = advantages(batch, AlgorithmConfig(advantage=literal))
    theirs_N = flat(ORACLE["advantages"][literal]) * batch.loss_mask_N
    torch.testing.assert_close(ours_N.double(), theirs_N, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("literal", "expected"),
    [
        ("grpo", [2 / 2**0.5, 0.0, -1 / 2**0.5, -1 / 2**0.5]),
        ("dr_grpo", [2.0, 0.0, -1.0, -1.0]),
        ("rloo", [8 / 3, 0.0, -4 / 3, -4 / 3]),
    ],
)
def test_by_hand(literal: str, expected: list[float]) -> None:
    # rewards 3 1 0 0: mean 1, squares 4 0 1 1, unbiased std sqrt(6 / 3)
    ours_N = advantages(rewards_batch([3, 1, 0, 0]), AlgorithmConfig(advantage=literal))
    torch.testing.assert_close(ours_N[1::2], torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("literal", sorted(ESTIMATORS))
def test_no_spread_and_a_group_of_one_give_exactly_zero(literal: str) -> None:
    ours_N = advantages(rewards_batch([0.1] * 7, [5.0], [1.0, 0.0]), AlgorithmConfig(advantage=literal))
    assert (ours_N[:16] == 0).all()
    assert (ours_N[16:][1::2] != 0).all()


def test_rewards_of_low_variance_stay_finite() -> None:
    ours_N = advantages(rewards_batch([1, 1.00001, 2, 2.00001]), AlgorithmConfig(advantage="grpo"))
    torch.testing.assert_close(
        ours_N[1::2], torch.tensor([-0.8660, -0.8660, 0.8660, 0.8660]), atol=1e-4, rtol=0
    )


def test_scale_multiplies() -> None:
    batch = rewards_batch([1.0, 0.0])
    ours_N = advantages(batch, AlgorithmConfig(advantage="dr_grpo", advantage_scale=4.0))
    assert ours_N.tolist() == [0.0, 2.0, 0.0, -2.0]
