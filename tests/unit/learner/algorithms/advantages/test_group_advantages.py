"""Estimators that compare the rollouts of a group, with numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from advantage_cases import on_ranks, tokens_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import ORACLE, flat, oracle_batch, rewards_batch, rollout

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.advantages import advantages
from asyncrl.learner.algorithms.advantages.group_advantages import best_of_k_gains, soft_mean, win_rate
from asyncrl.learner.algorithms.registry import AlgorithmContext, Gather
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.types import Group, Sampling, Task


def of_rollouts(
    batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext | None = None
) -> list[float]:
    """The advantage of each rollout's last token."""
    advantages_N = advantages(batch, config, context or AlgorithmContext())
    ends = torch.tensor(batch.lengths_R).cumsum(0) - 1
    return advantages_N[ends].tolist()


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
        ("asymre", [2.1, 0.1, -0.9, -0.9]),  # V = 1 − 0.1
        ("opo", [2.0, 0.0, -1.0, -1.0]),  # all of one length: the plain mean
        ("gpg", [2.0, 0.0, -1.0, -1.0]),  # no group without spread
        ("pass_at_k", [2.0, 0.0, 0.0, 0.0]),
        ("reinforce_pp_baseline", [2 / 2**0.5, 0.0, -1 / 2**0.5, -1 / 2**0.5]),
        # beats three, ties itself: (3 + ½) / 4 − ½; the last two tie each other and themselves: 1 / 4 − ½
        ("sppo", [3.5 / 4 - 0.5, 2.5 / 4 - 0.5, 1 / 4 - 0.5, 1 / 4 - 0.5]),
    ],
)
def test_rewards_3_1_0_0(literal: str, expected: list[float]) -> None:
    # mean 1, squares 4 0 1 1, unbiased variance 2
    assert of_rollouts(rewards_batch([3, 1, 0, 0]), AlgorithmConfig(advantage=literal)) == pytest.approx(
        expected, abs=1e-5
    )


def test_opo_weighs_rewards_by_length() -> None:
    batch = tokens_batch(["0111", "010"], [1.0, 0.0])  # baseline 3 · 1 / (3 + 1)
    ours_N = advantages(batch, AlgorithmConfig(advantage="opo"))
    assert ours_N.tolist() == [0, 0.25, 0.25, 0.25, 0, -0.75, 0]


def test_gpg_makes_up_for_groups_without_spread() -> None:
    # B = 6 rollouts, M = 4 of them in groups without spread; zero rewards have nothing to do with it
    batch = rewards_batch([1, 0], [1, 1], [0, 0])
    assert of_rollouts(batch, AlgorithmConfig(advantage="gpg")) == [1.5, -1.5, 0, 0, 0, 0]
    assert of_rollouts(rewards_batch([1, 1]), AlgorithmConfig(advantage="gpg")) == [0, 0]


def test_gpg_counts_over_all_ranks() -> None:
    shares = [rewards_batch([1, 0]), rewards_batch([1, 1], [0, 0])]
    config = AlgorithmConfig(advantage="gpg")

    def work(rank: int, gather: Gather) -> list[float]:
        return of_rollouts(shares[rank], config, AlgorithmContext(gather=gather))

    assert on_ranks(2, work) == [[1.5, -1.5], [0, 0, 0, 0]]


def test_gdpo_normalises_each_part_by_itself() -> None:
    # right: ±1/√2 · (1 + ...) in both groups; length: only the first group has a spread, a hundred times as large.
    parts = {"right": [1.0, 0.0, 1.0, 0.0], "length": [0.0, 100.0, 5.0, 5.0]}
    batch = tokens_batch(["01"] * 4, [0.0] * 4, groups=[0, 0, 1, 1], parts=parts)
    unit = 1 / 2**0.5
    sums = [unit - 0.5 * unit, -unit + 0.5 * unit, unit, -unit]  # mean 0
    deviation = math.sqrt(sum(x * x for x in sums) / 3)
    ours = of_rollouts(
        batch, AlgorithmConfig(advantage="gdpo"), AlgorithmContext(part_weights={"length": 0.5})
    )
    assert ours == pytest.approx([x / deviation for x in sums], abs=1e-5)


def test_gdpo_of_a_reward_without_parts_is_whitened_grpo() -> None:
    batch = rewards_batch([3, 1, 0, 0])
    assert of_rollouts(batch, AlgorithmConfig(advantage="gdpo")) == pytest.approx(
        of_rollouts(batch, AlgorithmConfig(advantage="reinforce_pp_baseline")), abs=1e-5
    )


def test_a_part_that_a_group_lacks_counts_as_0() -> None:
    one, other = rollout([1, 2], 1, reward=1.0), rollout([1, 2], 1)
    told = dataclasses.replace(one, reward_parts={"right": 1.0})
    groups = [
        Group.from_rollouts(Task(0, ""), Sampling(), [told, other]),
        Group.from_rollouts(Task(1, ""), Sampling(), [one, other]),
    ]
    assert MicroBatch.of(groups).parts_R["right"].tolist() == [1, 0, 0, 0]


def test_reinforce_pp_baseline_whitens_over_tokens() -> None:
    # R − mean: 1 on three tokens, −1 on one. Mean ½, unbiased variance (3 · ¼ + 9 / 4) / 3 = 1
    batch = tokens_batch(["0111", "01"], [2.0, 0.0])
    ours_N = advantages(batch, AlgorithmConfig(advantage="reinforce_pp_baseline"))
    assert ours_N.tolist() == pytest.approx([0, 0.5, 0.5, 0.5, 0, -1.5])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=6), st.integers(2, 6))
def test_best_of_k_is_the_mean_over_all_subsets(rewards: list[int], k: int) -> None:
    rewards_n = torch.tensor(rewards, dtype=torch.float64)
    size = min(k, len(rewards))
    expected = [0.0] * len(rewards)
    if size >= 2:
        subsets = list(itertools.combinations(range(len(rewards)), size))
        for subset in subsets:
            best = max(rewards[i] for i in subset)
            for i in subset:
                without = max(rewards[j] for j in subset if j != i)
                expected[i] += (best - without) / len(subsets)
    assert best_of_k_gains(rewards_n, k).tolist() == pytest.approx(expected)


def test_pass_at_2_of_3() -> None:
    # subsets {2,1} {2,0} {1,0}: the best of each gains 1, 2, 1
    config = AlgorithmConfig(advantage="pass_at_k", pass_k=2)
    assert of_rollouts(rewards_batch([0, 2, 1]), config) == pytest.approx([0, 3 / 3, 1 / 3])


def test_pass_at_k_is_an_unbiased_gradient_of_the_best_of_k() -> None:
    # Rewards 0 and 1, P(1) = p: E[best of 2] = 1 − (1 − p)², whose derivative is 2(1 − p). All groups of 3, by chance.
    p, gradient = 0.3, 0.0
    for rewards in itertools.product([0.0, 1.0], repeat=3):
        chance = math.prod(p if r else 1 - p for r in rewards)
        scores = [1 / p if r else -1 / (1 - p) for r in rewards]  # d log π / dp
        gains = best_of_k_gains(torch.tensor(rewards), 2).tolist()
        gradient += chance * sum(a * s for a, s in zip(gains, scores, strict=True))
    assert gradient == pytest.approx(2 * (1 - p))


def test_sppo_with_a_soft_mean() -> None:
    config = AlgorithmConfig(advantage="sppo", sppo_beta=1.0, sppo_eta=2.0)
    base = math.log((math.exp(1) + 1) / 2)
    assert of_rollouts(rewards_batch([1, 0]), config) == pytest.approx([2 * (1 - base), -2 * base])


def test_win_rates_and_soft_means() -> None:
    assert win_rate(torch.tensor([5.0])).tolist() == [0.5]
    assert win_rate(torch.tensor([1.0, 0.0])).tolist() == [0.75, 0.25]
    rewards_n = torch.tensor([0.0, 1e30], dtype=torch.float64)
    assert soft_mean(rewards_n, 0.0) == 5e29
    assert soft_mean(rewards_n, 1.0).isfinite()
    assert float(soft_mean(torch.tensor([0.0, 1.0]), 1e-4)) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("literal", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "pass_at_k", "sppo"])
def test_no_spread_and_a_group_of_one_give_exactly_zero(literal: str) -> None:
    ours_N = advantages(rewards_batch([0.1] * 7, [5.0], [1.0, 0.0]), AlgorithmConfig(advantage=literal))
    assert (ours_N[:16] == 0).all()
    assert ours_N[16:].any()


def test_rewards_of_low_variance_stay_finite() -> None:
    ours = of_rollouts(rewards_batch([1, 1.00001, 2, 2.00001]), AlgorithmConfig(advantage="grpo"))
    assert ours == pytest.approx([-0.8660, -0.8660, 0.8660, 0.8660], abs=1e-4)


def test_asymre_moves_the_mean_of_groups_without_spread_too() -> None:
    config = AlgorithmConfig(advantage="asymre", baseline_shift=-0.25)
    assert of_rollouts(rewards_batch([1, 1], [0, 0], [1, 0]), config) == [0.25, 0.25, 0.25, 0.25, 0.75, -0.25]


def off_policy(
    rewards: list[float], weights: list[float], groups: list[int] | None = None, **settings: float
) -> list[float]:
    """The advantages of rollouts of two policy tokens and a tool's between them. weights: π/μ of each rollout; each
    policy token has the square root of it."""
    logs = [math.log(weight) / 2 for weight in weights]
    batch = tokens_batch(
        ["0101"] * len(rewards),
        rewards,
        groups=groups or [0] * len(rewards),
        behaviour=[[0.0, -1.0, -9.0, -2.0]] * len(rewards),
        proximal=[[0.0, -1.0 + log, 0.0, -2.0 + log] for log in logs],
    )
    return of_rollouts(batch, AlgorithmConfig(advantage="off_policy_baseline", **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rewards", "weights", "expected"),
    [
        ([1, 0], [0.5, 2.0], [0.75, -0.25]),  # V = (½ · 1 + 1 · 0) / 2
        ([1, 0], [4.0, 0.5], [0.5, -0.5]),  # more of a right answer than μ had counts as much as μ had
        ([1, 1], [0.5, 0.25], [0.625, 0.625]),  # all right, and less probable now: V = (½ + ¼) / 2
        ([1, 1], [3.0, 2.0], [0, 0]),
        ([1, 1], [0.95, 0.95], [0, 0]),  # less probable by less than a tenth
        ([1, 1], [0.85, 0.85], [0.15, 0.15]),
        ([1, 0.9], [0.95, 0.95], [0.0975, -0.0025]),  # small, and counts: the group has spread
        ([0, 0], [0.5, 2.0], [0, 0]),
        (
            [-1, -1],
            [0.5, 0.5],
            [-0.5, -0.5],
        ),  # the answers that the policy has moved to have 0, which is better
    ],
)
def test_the_off_policy_baseline_by_hand(
    rewards: list[float], weights: list[float], expected: list[float]
) -> None:
    assert off_policy(rewards, weights) == pytest.approx(expected, abs=1e-6)


def test_the_floor_of_the_off_policy_baseline() -> None:
    # V = −1 + (½ · 0 + ½ · 2) / 2 = −½
    assert off_policy([-1, 1], [0.5, 0.5], baseline_floor=-1.0) == pytest.approx([-0.5, 1.5], abs=1e-6)


def test_the_off_policy_baseline_of_each_group_is_its_own() -> None:
    ours_R = off_policy([1, 0, 1, 1], [0.5, 2.0, 0.5, 0.25], groups=[0, 0, 7, 7])
    assert ours_R == pytest.approx([0.75, -0.25, 0.625, 0.625], abs=1e-6)


@given(rewards=st.lists(st.floats(-3, 3), min_size=2, max_size=6), floor=st.floats(-3, 3))
@settings(max_examples=50, deadline=None)
def test_the_off_policy_baseline_of_fresh_data_is_the_mean(rewards: list[float], floor: float) -> None:
    ours_R = off_policy(rewards, [1.0] * len(rewards), baseline_floor=floor)
    expected_R = of_rollouts(rewards_batch(rewards), AlgorithmConfig(advantage="dr_grpo"))
    assert ours_R == pytest.approx(expected_R, abs=2e-5)


@given(rewards=st.lists(st.floats(-3, 3), min_size=2, max_size=6), floor=st.floats(-3, 3), data=st.data())
@settings(max_examples=50, deadline=None)
def test_the_off_policy_baseline_is_a_reward_that_was_possible(
    rewards: list[float], floor: float, data: st.DataObject
) -> None:
    weights = [data.draw(st.floats(1e-3, 1e3)) for _ in rewards]
    for reward, ahead in zip(rewards, off_policy(rewards, weights, baseline_floor=floor), strict=True):
        assert min(*rewards, floor) - 1e-5 <= reward - ahead <= max(*rewards, floor) + 1e-5
