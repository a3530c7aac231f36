"""What holds for every estimator: masks, order, ranks, extremes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from advantage_cases import on_ranks, random_batch, tokens_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import rewards_batch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.advantages import advantages
from asyncrl.learner.algorithms.advantages.return_advantages import value_targets
from asyncrl.learner.algorithms.registry import ADVANTAGES, AlgorithmContext, Gather
from asyncrl.learner.data.batch import MicroBatch

LITERALS = sorted(ADVANTAGES)
STREAMING = [name for name in LITERALS if "batch" not in ADVANTAGES[name].needs]
SEEDS = st.integers(0, 10_000)
every_estimator = pytest.mark.parametrize("literal", LITERALS)


def config(literal: str) -> AlgorithmConfig:
    return AlgorithmConfig(advantage=literal, gamma=0.9, lam=0.8, vapo_alpha=0.5, cost_part="cost")  # type: ignore[arg-type]


def close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@every_estimator
def test_what_stands_at_masked_tokens_never_matters(literal: str) -> None:
    batch = random_batch(1)
    outside_N = ~batch.loss_mask_N
    spoilt = dataclasses.replace(
        batch,
        behaviour_N=batch.behaviour_N.masked_fill(outside_N, torch.nan),
        columns={
            name: column.masked_fill(outside_N, torch.nan if column.is_floating_point() else 99)
            for name, column in batch.columns.items()
        },
    )
    assert torch.equal(advantages(spoilt, config(literal)), advantages(batch, config(literal)))
    assert (advantages(batch, config(literal))[outside_N] == 0).all()


@settings(deadline=None, max_examples=20)
@given(SEEDS)
@every_estimator
def test_the_order_of_groups_and_of_their_rollouts_changes_nothing(literal: str, seed: int) -> None:
    batch, random = random_batch(seed), np.random.default_rng(seed)
    groups = random.permutation(3)
    order = [int(3 * group + place) for group in groups for place in random.permutation(3)]
    whole_N = advantages(batch, config(literal))
    close(advantages(batch.select(order), config(literal)), whole_N[batch.tokens_of(order)])


@settings(deadline=None, max_examples=5)
@given(SEEDS, st.integers(0, 4))
@every_estimator
def test_any_split_over_ranks_gives_the_same(literal: str, seed: int, cut: int) -> None:
    batch = random_batch(seed, groups=4)
    shares = [range(3 * cut), range(3 * cut, 12)]

    def work(rank: int, gather: Gather) -> Tensor:
        if not shares[rank]:
            return advantages(MicroBatch.empty(), config(literal), AlgorithmContext(gather=gather))[:0]
        return advantages(batch.select(shares[rank]), config(literal), AlgorithmContext(gather=gather))

    close(torch.cat(on_ranks(2, work)), advantages(batch, config(literal)))


@settings(deadline=None, max_examples=10)
@given(SEEDS)
@pytest.mark.parametrize("literal", STREAMING)
def test_what_streams_needs_only_its_own_group(literal: str, seed: int) -> None:
    batch = random_batch(seed)
    alone = [advantages(batch.select(range(start, start + 3)), config(literal)) for start in (0, 3, 6)]
    close(torch.cat(alone), advantages(batch, config(literal)))


@every_estimator
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_extreme_rewards_stay_finite(literal: str, scale: float) -> None:
    batch = random_batch(3, scale=scale)
    assert advantages(batch, config(literal)).isfinite().all()
    assert all(target.isfinite().all() for target in value_targets(batch, config(literal)).values())


@every_estimator
def test_a_batch_that_the_policy_wrote_nothing_of_gets_zeros(literal: str) -> None:
    assert (advantages(MicroBatch.empty(), config(literal)) == 0).all()
    assert (advantages(tokens_batch(["00", "0"], [1.0, 0.0]), config(literal)) == 0).all()


@every_estimator
def test_a_rollout_without_policy_tokens_is_no_obstacle(literal: str) -> None:
    batch = random_batch(4)
    kept_N = batch.loss_mask_N & (batch.seq_N != 4)
    ours_N = advantages(dataclasses.replace(batch, loss_mask_N=kept_N), config(literal))
    assert ours_N.isfinite().all()
    assert (ours_N[batch.seq_N == 4] == 0).all()


@every_estimator
def test_scale_multiplies(literal: str) -> None:
    batch, plain = random_batch(5), config(literal)
    fourfold = dataclasses.replace(plain, advantage_scale=4.0)
    assert torch.equal(advantages(batch, fourfold), 4 * advantages(batch, plain))


def test_advantages_are_float32() -> None:
    assert advantages(rewards_batch([1.0, 0.0]), AlgorithmConfig()).dtype == torch.float32
