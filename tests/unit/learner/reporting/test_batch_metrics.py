"""Metrics of a batch, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_cases import rewards_batch, rollout

from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.reporting.batch_metrics import (
    advantage_metrics,
    batch_metrics,
    end_metrics,
    token_metrics,
    value_metrics,
    version_values,
)
from asyncrl.telemetry.metrics import Deviation, EffectiveShare, ExplainedVariance, Max, Metrics, Min
from asyncrl.types import Finish, Group, Rollout, Sampling, Task


def group(*versions: int) -> Group:
    """A rollout of two policy tokens per version."""
    rollouts = [rollout([1, 2, 3], 1, version=v) for v in versions]
    return Group.from_rollouts(Task(0, ""), Sampling(), rollouts)


def test_staleness_of_a_group_is_that_of_its_oldest_token() -> None:
    values = batch_metrics(MicroBatch.of([group(5, 3), group(5, 5)]), version=5).values()
    assert [values[f"train/staleness/{name}"] for name in ("mean", "max", "token")] == [1.0, 2.0, 0.5]
    assert [values[f"train/{name}"] for name in ("groups", "rollouts", "tokens")] == [2, 4, 8]


def test_a_rollout_is_as_long_as_its_segments() -> None:
    """Contexts of 1 and 2 tokens, answers of 2 and 1."""
    both = Rollout.from_segments([rollout([1, 2, 3], 1), rollout([1, 2, 3], 2)])
    batch = MicroBatch.of([group(5), Group.from_rollouts(Task(1, ""), Sampling(), [both])])
    values = batch_metrics(batch, version=5).values()
    assert [values[f"rollout/length/{name}"] for name in ("mean", "min", "max")] == [2.5, 2, 3]
    assert values["rollout/segments/mean"] == 1.5
    assert (values["train/tokens"], values["train/tokens_with_prompts"]) == (5, 9)


def test_staleness_is_made_in_flight_and_in_the_queue() -> None:
    """At version 9: made from 3 to 5 and then 4 versions in the queue; made at once at 8 and 1 version in the queue."""
    values = batch_metrics(MicroBatch.of([group(5, 3, 4), group(8)]), version=9).values()
    in_flight, in_queue = values["train/staleness/in_flight"], values["train/staleness/in_queue"]
    assert (in_flight, in_queue) == ((2 + 0) / 2, (4 + 1) / 2)
    assert values["train/staleness/mean"] == in_flight + in_queue == 3.5


def test_old_groups_have_a_length_of_their_own() -> None:
    """Rollouts of 2 tokens at the ages 0 and 1; of 3 at the age 2, and of 1 in the same group."""
    late = [rollout([1, 2, 3, 4], 1, version=7), rollout([1, 2], 1, version=9)]
    groups = [group(9, 9), group(8), Group.from_rollouts(Task(1, ""), Sampling(), late)]
    values = batch_metrics(MicroBatch.of(groups), version=9).values()
    assert (values["rollout/length/fresh"], values["rollout/length/old"]) == (2.0, (3 + 1) / 2)
    assert "rollout/length/old" not in batch_metrics(MicroBatch.of(groups[:2]), version=9).values()


def test_parts_of_the_reward_have_means_of_their_own() -> None:
    batch = dataclasses.replace(rewards_batch([1, 2]), parts_R={"cost": torch.tensor([0.5, 0.0])})
    values = version_values(batch_metrics(batch, version=0))
    assert (values["rollout/reward/mean"], values["rollout/reward/part/cost"]) == (1.5, 0.25)


def test_rewards_spread_over_all_rollouts_of_all_ranks() -> None:
    """Rewards 1 and 3 on one rank, 5 and 7 on the other: mean 4, variance (9 + 1 + 1 + 9) / 4."""
    ranks = [batch_metrics(rewards_batch(rewards), version=0).to_wire() for rewards in ([1, 3], [5, 7])]
    metrics = Metrics()
    metrics.merge(map(Metrics.from_wire, ranks))
    values = metrics.values()
    assert [values[f"rollout/reward/{name}"] for name in ("mean", "min", "max")] == [4, 1, 7]
    assert values["rollout/reward/std"] == pytest.approx(math.sqrt(5))


def test_rollouts_that_a_limit_ended_are_truncated() -> None:
    def ended(*finishes: Finish) -> Group:
        return dataclasses.replace(group(*[0] * len(finishes)), finish=finishes)

    metrics = Metrics()
    metrics.merge(
        [end_metrics([ended("stop", "length"), ended("length")]), end_metrics([ended("stop", "stop")])]
    )
    assert metrics.values() == {"rollout/length/truncated": pytest.approx(2 / 5)}


def test_a_part_that_a_claim_lacks_counts_as_0_there() -> None:
    with_cost = dataclasses.replace(rewards_batch([1, 2]), parts_R={"cost": torch.tensor([0.5, 0.5])})
    metrics = Metrics()
    metrics.merge(batch_metrics(claim, version=0) for claim in (with_cost, rewards_batch([0, 0, 0])))
    assert version_values(metrics)["rollout/reward/part/cost"] == pytest.approx(1 / 5)


def test_groups_without_any_advantage_are_flat() -> None:
    batch = rewards_batch([1, 1], [1, 0], [0, 0])
    batch = batch.with_advantages(torch.tensor([0.0, 0, 0, 0, 0, 1, 0, -1, 3, 0, 0, 0]))
    # The last group's advantage stands on a token of the prompt.
    assert advantage_metrics(batch).values() == {"rollout/flat_group_fraction": pytest.approx(2 / 3)}


def test_values_that_foretell_half_of_the_variance() -> None:
    batch = rewards_batch([0, 0, 0, 0]).with_columns(
        returns=torch.tensor([9.0, 0, 9, 2, 9, 4, 9, 6]), values=torch.tensor([7.0, 0, 7, 0, 7, 4, 7, 8])
    )
    values = value_metrics(batch).values()
    # Returns 0 2 4 6: variance 5. Errors 0 2 0 -2: variance 2.
    assert values["train/critic/explained_variance"] == pytest.approx(1 - 2 / 5)
    assert (values["train/critic/returns"], values["train/critic/values"]) == (3.0, 3.0)
    assert "train/cost_critic/returns" not in values


def test_tokens_that_left_the_behaviour_policy() -> None:
    """log μ = -1 everywhere; two policy tokens with w = 2 and w = 1, the second one of weight 0."""
    batch = rewards_batch([0, 0]).with_columns(reference=torch.tensor([0, -1.0, 0, -1.0]))
    logp_N = torch.tensor([9.0, math.log(2) - 1, 9.0, -1.0])
    entropy_N, clipped_N = torch.tensor([5.0, 0.25, 5, 0.75]), torch.tensor([True, True, True, False])
    weight_N = torch.tensor([0.0, 1.5, 0.0, 0.0])
    values = token_metrics(batch, logp_N, entropy_N, clipped_N, weight_N).values()
    log2 = math.log(2)
    expected = {
        "train/ratio/mean": 1.5,
        "train/ratio/max": 2.0,
        "train/effective_sample_size": 9 / (2 * 5),
        "train/approx_kl_k1": -log2 / 2,
        "train/approx_kl": (1 - log2) / 2,
        "train/kl/reference": (0.5 - 1 + log2) / 2,
        "train/entropy": 0.5,
        "train/clip_fraction": 0.5,
        "train/zero_weight_fraction": 0.5,
    }
    assert values == pytest.approx(expected, abs=1e-6)


@given(st.floats(-1e-3, 1e-3))
def test_k3_is_never_negative(moved: float) -> None:
    batch = rewards_batch([0, 0])
    logp_N, nothing_N = batch.behaviour_N + torch.tensor([0.0, moved, 0.0, moved]), torch.zeros(4)
    values = token_metrics(batch, logp_N, nothing_N, nothing_N.bool(), nothing_N).values()
    exactly = float(logp_N[1].double() + 1)
    assert values["train/approx_kl"] >= 0
    assert values["train/approx_kl"] == pytest.approx(math.expm1(exactly) - exactly, abs=1e-10)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=9), st.integers(0, 9))
def test_shares_and_variances_add_up_over_ranks(weights: list[float], cut: int) -> None:
    def of(some: list[float]) -> Metrics:
        metrics, x = Metrics(), np.array(some)
        metrics.add("ess", EffectiveShare(x.sum(), (x**2).sum(), len(x)))
        errors = x - 1
        metrics.add("ev", ExplainedVariance(x.sum(), (x**2).sum(), errors.sum(), (errors**2).sum(), len(x)))
        metrics.add("std", Deviation(x.sum(), (x**2).sum(), len(x)))
        metrics.add("min", Min(min(some, default=math.inf)))
        metrics.add("max", Max(max(some, default=-math.inf)))
        return metrics

    both = Metrics()
    both.merge(Metrics.from_wire(of(part).to_wire()) for part in (weights[:cut], weights[cut:]))
    assert both.values() == pytest.approx(of(weights).values(), abs=1e-6)
    spread = (both.values()["std"], both.values()["min"], both.values()["max"])
    assert spread == pytest.approx((np.std(weights), min(weights), max(weights)), abs=1e-3)


def test_nothing_has_no_share_and_no_variance() -> None:
    assert EffectiveShare(0, 0, 0).value == 0
    assert Deviation(0, 0, 0).value == 0
    assert Deviation(3 * 0.1, 3 * 0.1**2, 3).value == 0  # 0.1, three times
    assert ExplainedVariance(0, 0, 0, 0, 0).value == 0
    assert ExplainedVariance(2, 2, 5, 25, 2).value == 0  # targets 1 and 1
