"""Rewards before advantages: overlong penalty, KL inside the reward, resampling."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from advantage_cases import on_ranks, random_batch, tokens_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig, ShapingConfig
from asyncrl.errors import TrainingError
from asyncrl.learner.algorithms.registry import AlgorithmContext, Gather
from asyncrl.learner.algorithms.shaping import (
    next_kl_coef,
    overlong_penalty,
    resampled_copies,
    resampling_weights,
    shape,
)
from asyncrl.learner.data.batch import MicroBatch


def shaped(batch: MicroBatch, **keys: float | str) -> MicroBatch:
    shaping = ShapingConfig(**keys)  # type: ignore[arg-type]
    return shape(batch, AlgorithmConfig(shaping=shaping), 4, shaping.kl_coef, AlgorithmContext())[0]


def test_nothing_asked_nothing_changed() -> None:
    batch = tokens_batch(["0110", "01"], [2.0, 3.0])
    after, metrics = shape(batch, AlgorithmConfig(), 4, 0.0, AlgorithmContext())
    assert after.rewards_R.tolist() == [2, 3]
    assert after.columns["token_rewards"].tolist() == [0, 0, 2, 0, 0, 3]
    assert after.copies_R.tolist() == [1, 1]
    assert metrics.values() == {}


@pytest.mark.parametrize(("length", "score"), [(1, 0.5), (2, 0.5), (3, 0.0), (4, -0.5), (9, -0.5)])
def test_the_overlong_penalty_of_the_contract(length: int, score: float) -> None:
    assert 0.5 - float(overlong_penalty(torch.tensor([length]), 4, buffer=2, factor=1.0)) == score


def test_the_overlong_penalty_counts_policy_tokens_and_comes_off_the_last() -> None:
    batch = tokens_batch(["01101", "00010"], [0.5, 0.5])
    after = shaped(batch, overlong_buffer=2)  # of 4 tokens; 3 of the policy in the first rollout
    assert after.rewards_R.tolist() == [0.0, 0.5]
    assert after.columns["token_rewards"].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0.5, 0]


def test_the_kl_is_taken_off_every_policy_token() -> None:
    columns = {"behaviour": [[9.0, -1.0, -2.0, 9.0]], "reference": [[0.0, -1.5, -1.0, 0.0]]}
    after = shaped(tokens_batch(["0110"], [2.0], **columns), kl_coef=0.5)
    assert after.columns["token_rewards"].tolist() == [0, -0.25, 2 + 0.5, 0]
    assert after.rewards_R.tolist() == [2.25]
    squared = shaped(tokens_batch(["0110"], [2.0], **columns), kl_coef=0.5, kl_form="k2")
    assert squared.columns["token_rewards"].tolist() == [0, -0.5 * 0.125, 2 - 0.25, 0]


def test_the_kl_is_that_of_the_proximal_policy_where_it_is_known() -> None:
    batch = tokens_batch(
        ["01"], [0.0], behaviour=[[0.0, -5.0]], proximal=[[0.0, -1.0]], reference=[[0.0, -2.0]]
    )
    assert shaped(batch, kl_coef=1.0).rewards_R.tolist() == [-1.0]


def test_step_rewards_and_kl_add_up() -> None:
    batch = tokens_batch(
        ["011"], [3.0], step_rewards=[[0.0, 1.0, 0.0]], behaviour=[[0.0, 1.0, 1.0]], reference=[[0.0] * 3]
    )
    after = shaped(batch, kl_coef=0.25)
    assert after.columns["token_rewards"].tolist() == [0, 0.75, 1.75]
    assert after.rewards_R.tolist() == [2.5]


def test_measures() -> None:
    batch = tokens_batch(
        ["011", "01", "00"],
        [1.0] * 3,
        behaviour=[[0.0, 1.0, 3.0], [0.0, 6.0], [0.0] * 2],
        reference=[[0.0] * 3, [0.0] * 2, [0.0] * 2],
    )
    config = AlgorithmConfig(shaping=ShapingConfig(kl_coef=0.1, overlong_buffer=3))
    _, metrics = shape(batch, config, 4, 0.2, AlgorithmContext())
    # the mean of the rollouts' means 2 and 6; lengths 2 and 1 of 4 with 3 to go: ⅓ and 0
    assert metrics.values() == {
        "train/kl/reward": 4.0,
        "rollout/reward/overlong_penalty": pytest.approx(1 / 6),
    }


def test_a_kl_without_a_reference_is_refused() -> None:
    with pytest.raises(TrainingError, match="lack the column 'reference'"):
        shaped(tokens_batch(["01"], [1.0]), kl_coef=0.1)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (1.1, 0.5 * (1 + 0.1 * 100 / 1000)),
        (5.0, 0.5 * (1 + 0.2 * 100 / 1000)),
        (0.0, 0.5 * (1 - 0.2 * 100 / 1000)),
    ],
)
def test_the_adaptive_coefficient(kl: float, expected: float) -> None:
    shaping = ShapingConfig(kl_coef=0.5, kl_target=1.0, kl_horizon=1000)
    assert next_kl_coef(0.5, kl, 100, shaping) == pytest.approx(expected)


def test_the_coefficient_is_fixed_without_a_target() -> None:
    assert next_kl_coef(0.5, 9.0, 100, ShapingConfig(kl_coef=0.5)) == 0.5


def test_a_batch_larger_than_the_horizon_counts_as_one_horizon() -> None:
    shaping = ShapingConfig(kl_coef=0.5, kl_target=1.0, kl_horizon=1)
    assert next_kl_coef(0.5, 0.0, 100, shaping) == pytest.approx(0.5 * 0.8)
    assert next_kl_coef(0.5, 9.0, 100, shaping) == pytest.approx(0.5 * 1.2)


@pytest.mark.parametrize(
    ("how", "weights"),
    [
        ("pow", [0.25, 0.0, 1.0, 0.25]),
        ("max_min", [0.0, 0.0, 1.0, 1.0]),
        ("max_random", [0.1, 0.1, 0.4, 0.1]),
    ],
)
def test_resampling_weights(how: str, weights: list[float]) -> None:
    shaping = ShapingConfig(resample=how)  # type: ignore[arg-type]
    ours_B = resampling_weights(torch.tensor([1.0, 0.0, 2.0, -1.0]), shaping)
    assert ours_B.tolist() == pytest.approx(weights, abs=1e-7)


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [1e30, -1e30], [5.0]])
@pytest.mark.parametrize("how", ["pow", "max_min", "max_random"])
def test_resampling_weights_of_extremes_are_finite_and_positive(how: str, rewards: list[float]) -> None:
    shaping = ShapingConfig(resample=how, resample_power=20.0)  # type: ignore[arg-type]
    weights_B = resampling_weights(torch.tensor(rewards), shaping)
    assert weights_B.isfinite().all()
    assert (weights_B > 0).all()


def test_as_many_are_drawn_as_there_are_and_by_their_weight() -> None:
    # 3000 rollouts; those of reward 1 have nearly all the weight
    batch = tokens_batch(
        ["01"] * 3000, [1.0, 0.0, 0.0] * 1000, groups=[g for g in range(1000) for _ in range(3)]
    )
    copies_R = resampled_copies(batch, ShapingConfig(resample="pow"), AlgorithmContext(seed=(1, 2)))
    assert copies_R.sum() == 3000
    assert copies_R[0::3].sum() == 3000
    # each of 1000 is expected 3 times: a Poisson law nearly, whose variance is 3 ± 3 · sqrt((2·3² + 3) / 1000)
    assert 2.5 < float(copies_R[0::3].var()) < 3.5


def test_seed_and_version_decide() -> None:
    batch = random_batch(0, groups=8)
    shaping = ShapingConfig(resample="max_random")
    draws = {
        seed: resampled_copies(batch, shaping, AlgorithmContext(seed=seed))
        for seed in [(0, 1), (0, 2), (1, 1)]
    }
    assert torch.equal(draws[0, 1], resampled_copies(batch, shaping, AlgorithmContext(seed=(0, 1))))
    assert not torch.equal(draws[0, 1], draws[0, 2])
    assert not torch.equal(draws[0, 1], draws[1, 1])


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.integers(0, 4))
def test_who_is_drawn_does_not_depend_on_ranks_or_order(seed: int, cut: int) -> None:
    batch, shaping = random_batch(seed, groups=4), ShapingConfig(resample="pow")
    expected_R = resampled_copies(batch, shaping, AlgorithmContext(seed=(seed,)))
    order = np.random.default_rng(seed).permutation(4)
    mixed = [int(3 * group + place) for group in order for place in range(3)]
    shares = [mixed[: 3 * cut], mixed[3 * cut :]]

    def work(rank: int, gather: Gather) -> Tensor:
        mine = batch.select(shares[rank]) if shares[rank] else MicroBatch.empty()
        copies_R = resampled_copies(mine, shaping, AlgorithmContext(gather=gather, seed=(seed,)))
        return copies_R[: len(shares[rank])]

    assert torch.equal(torch.cat(on_ranks(2, work)), expected_R[mixed])


def test_rollouts_without_policy_tokens_are_not_drawn() -> None:
    batch = tokens_batch(["00", "01"], [9.0, 0.0])
    assert resampled_copies(batch, ShapingConfig(resample="pow"), AlgorithmContext()).tolist() == [0, 1]
    nothing = dataclasses.replace(batch, loss_mask_N=torch.zeros(4, dtype=torch.bool))
    assert resampled_copies(nothing, ShapingConfig(resample="pow"), AlgorithmContext()).tolist() == [0, 0]


def test_resampling_looks_at_rewards_with_the_overlong_penalty() -> None:
    after = shaped(tokens_batch(["01111", "01"], [1.0, 0.5]), overlong_buffer=2, resample="pow")
    assert after.rewards_R.tolist() == [0, 0.5]
    assert after.copies_R.tolist() == [0, 2]


def test_resampling_looks_at_rewards_without_the_kl() -> None:
    columns = {"behaviour": [[0.0, 9.0], [0.0, 0.0]], "reference": [[0.0] * 2, [0.0] * 2]}
    after = shaped(tokens_batch(["01", "01"], [0.0, 1.0], **columns), kl_coef=1.0, resample="pow")
    assert after.copies_R.tolist() == [0, 2]
    assert after.rewards_R.tolist() == [-9, 1]
