"""Estimators that look along a rollout, and what critics learn, with numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from advantage_cases import flat_column, tokens_batch
from learner_cases import ORACLE, flat, oracle_batch

from asyncrl.config.sections.algorithm import AlgorithmConfig, CorrectionConfig
from asyncrl.errors import TrainingError
from asyncrl.learner.algorithms.advantages import advantages
from asyncrl.learner.algorithms.advantages.return_advantages import (
    adaptive_lambda,
    next_multiplier,
    reward_advantages,
    value_targets,
)
from asyncrl.learner.algorithms.registry import AlgorithmContext

ORACLE_CONFIG = {"gamma": 0.9, "lam": 0.95}


@pytest.mark.parametrize("literal", ["gae", "reinforce_pp"])
def test_agrees_with_the_oracle(literal: str) -> None:
    batch = oracle_batch().with_columns(values=flat(ORACLE["inputs"]["values"]))
    ours_N = advantages(batch, AlgorithmConfig(advantage=literal, **ORACLE_CONFIG))
    theirs_N = flat(ORACLE["advantages"][literal]) * batch.loss_mask_N
    torch.testing.assert_close(ours_N.double(), theirs_N, atol=2e-6, rtol=0)


def test_targets_agree_with_the_oracle() -> None:
    batch = oracle_batch().with_columns(values=flat(ORACLE["inputs"]["values"]))
    ours_N = value_targets(batch, AlgorithmConfig(advantage="gae", **ORACLE_CONFIG))["returns"]
    theirs_N = flat(ORACLE["returns"]["gae"]) * batch.loss_mask_N
    torch.testing.assert_close(ours_N.double(), theirs_N, atol=2e-6, rtol=0)


def test_gae_by_hand_with_a_hole() -> None:
    # γ = ½, λ = ½; V 1 _ 2 on the policy's tokens, R = 4: δ = ½·2 − 1 = 0 and 4 − 2 = 2; A = 0 + ¼·2 and 2
    batch = tokens_batch(["0101"], [4.0], values=[[9.0, 1.0, 9.0, 2.0]])
    config = AlgorithmConfig(advantage="gae", gamma=0.5, lam=0.5)
    assert reward_advantages(batch, config, 0.5).tolist() == [0, 0.5, 0, 2]
    assert value_targets(batch, config)["returns"].tolist() == [0, 1.5, 0, 4]
    # whitened: mean 1.25, unbiased variance 2 · 0.75² = 1.125
    assert advantages(batch, config).tolist() == pytest.approx([0, -(0.5**0.5), 0, 0.5**0.5])


def test_vapo_has_a_lambda_per_rollout_and_none_for_the_critic() -> None:
    masks = ["0" + "1" * 40, "0" + "1" * 10]
    batch = tokens_batch(masks, [1.0, 1.0], values=[[0.5] * 41, [0.5] * 11])
    config = AlgorithmConfig(advantage="vapo", vapo_alpha=0.05, lam=0.5)
    assert adaptive_lambda(batch, config).tolist() == [0.5, 0]
    raw_N = reward_advantages(batch, config, adaptive_lambda(batch, config))
    assert raw_N[1:41].tolist() == pytest.approx([0.5 * 0.5 ** (39 - t) for t in range(40)])
    assert raw_N[42:].tolist() == [0] * 9 + [0.5]  # λ = 0: only the last token's own δ
    assert value_targets(batch, config)["returns"][1:41].tolist() == [1.0] * 40


def test_safe_rlhf_weighs_reward_against_cost() -> None:
    # λ_gae = 1, γ = 1: A_reward = 2 − V = 1.5 and 1; A_cost = 3 − V = 2 and 3. (A_r − 2 A_c) / 3
    batch = tokens_batch(
        ["011"], [2.0], parts={"cost": [3.0]}, values=[[9.0, 0.5, 1.0]], cost_values=[[9.0, 1.0, 0.0]]
    )
    config = AlgorithmConfig(advantage="safe_rlhf")
    ours_N = advantages(batch, config, AlgorithmContext(cost_multiplier=2.0))
    assert ours_N.tolist() == pytest.approx([0, -2.5 / 3, -5 / 3])
    targets = value_targets(batch, config)
    assert {name: each_N.tolist() for name, each_N in targets.items()} == {
        "returns": [0, 2, 2],
        "cost_returns": [0, 3, 3],
    }


def test_the_multiplier_grows_while_the_cost_is_above_its_limit() -> None:
    config = AlgorithmConfig(advantage="safe_rlhf", cost_lr=0.1, cost_limit=1.0)
    assert next_multiplier(2.0, 4.0, config) == pytest.approx(2 * math.exp(0.1 * 2 * 3))
    assert next_multiplier(2.0, 1.0, config) == 2.0
    assert next_multiplier(2.0, 0.0, config) < 2.0


def test_the_multiplier_stays_within_its_bounds_whatever_the_cost() -> None:
    """log λ += 0.1 λ · 3 alone would be infinite after a few dozen versions."""
    config = AlgorithmConfig(advantage="safe_rlhf", cost_lr=0.1, cost_multiplier_max=4.0)
    multiplier = 1.0
    for _ in range(100):
        multiplier = next_multiplier(multiplier, 3.0, config)
    assert multiplier == 4.0
    assert next_multiplier(4.0, 1e30, config) == 4.0
    assert next_multiplier(4.0, -1e30, config) == pytest.approx(4.0 / math.e)


def test_returns_of_reinforce_pp_are_whitened() -> None:
    # returns ½ 1 _ _ 2 (γ = ½): mean 7/6, unbiased variance 7/12
    batch = tokens_batch(["11001"], [2.0])
    ours_N = advantages(batch, AlgorithmConfig(advantage="reinforce_pp", gamma=0.5))
    deviation = (7 / 12) ** 0.5
    assert ours_N.tolist() == pytest.approx([(r - 7 / 6) / deviation if r else 0 for r in (0.5, 1, 0, 0, 2)])


def test_remax_compares_with_the_greedy_rollout() -> None:
    # 1 on the first token's step, the rest of R = 3 on the last one; the greedy rollout earned 2.5
    batch = tokens_batch(["0110"], [3.0], greedy=[2.5], step_rewards=[[0.0, 1.0, 0.0, 0.0]])
    assert advantages(batch, AlgorithmConfig(advantage="remax")).tolist() == [0, 0.5, -0.5, 0]


def test_remax_without_a_greedy_rollout_names_the_task() -> None:
    batch = tokens_batch(["01", "01"], [1.0, 1.0], groups=[0, 7], greedy=[1.0, math.nan])
    with pytest.raises(TrainingError, match="task 7 lacks the reward of a greedy rollout"):
        advantages(batch, AlgorithmConfig(advantage="remax"))


def otb(config: CorrectionConfig, rewards: list[float], behaviour: float = 0.0) -> list[float]:
    """Of three rollouts of three, two (with a tool between them) and one policy tokens. 1 − 2π + Σπ² of them:

    ½ 1 ½ | ¾ ½ | ¼, so that W = ½ 3/2 2 | ¾ 5/4 | ¼. behaviour: log π − log μ of the first token
    """
    pi = [[1.0, 0.5, 0.25, 0.5], [1.0, 0.25, 1.0, 0.5], [1.0, 0.5]]
    batch = tokens_batch(
        ["0111", "0101", "01"],
        rewards,
        proximal=[[math.log(p) for p in each] for each in pi],
        squares=[[1.0, 0.5, 0.5, 0.5], [1.0, 0.25, 1.0, 0.5], [1.0, 0.25]],
        behaviour=[[math.log(p) - behaviour * (at == 1) for at, p in enumerate(each)] for each in pi],
    )
    algorithm = AlgorithmConfig(
        advantage="optimal_token_baseline", loss="reinforce", proximal="frozen", correction=config
    )
    return advantages(batch, algorithm).tolist()


def test_the_optimal_token_baseline_by_hand() -> None:
    # The baselines are ½ / (½ + ¾ + ¼) = 1/3 and 3/2 / (3/2 + 5/4) = 6/11. The longest is alone at its third token.
    ours_N = otb(CorrectionConfig(), [1.0, 0.0, 0.0])
    assert ours_N == pytest.approx([0, 2 / 3, 5 / 11, 0, 0, -1 / 3, 0, -6 / 11, 0, -1 / 3], abs=1e-6)


def test_the_optimal_token_baseline_has_the_squared_weights_of_the_correction() -> None:
    # π_p/μ is 8, and 2 after truncation: W = 2 3 … | 3 7/2 | 1
    ours_N = otb(CorrectionConfig("tis", high=2.0), [1.0, 0.0, 0.0], behaviour=math.log(8))
    assert ours_N == pytest.approx([0, 2 / 3, 7 / 13, 0, 0, -1 / 3, 0, -6 / 13, 0, -1 / 3], abs=1e-6)


def test_the_optimal_token_baseline_of_equal_rewards_is_the_reward() -> None:
    assert otb(CorrectionConfig(), [0.1, 0.1, 0.1]) == [0] * 10


def test_the_optimal_token_baseline_of_a_certain_policy_is_the_mean() -> None:
    sure = [[0.0, 0.0], [0.0, 0.0]]
    batch = tokens_batch(["01", "01"], [1.0, 0.0], proximal=sure, squares=[[1.0, 1.0], [1.0, 1.0]])
    assert advantages(batch, AlgorithmConfig(advantage="optimal_token_baseline")).tolist() == [
        0,
        0.5,
        0,
        -0.5,
    ]


def test_prime_by_hand() -> None:
    # r = ½(prm − ref): 1 3 | 4 0. Means 2 and 2 (of the other rollout). Process returns with γ = ½:
    # (1 − 2) + ½(3 − 2) and 3 − 2 | (4 − 2) + ½(0 − 2) and 0 − 2. Outcome: rloo of 1 and 0 is 1 and −1.
    batch = tokens_batch(
        ["011", "011"],
        [1.0, 0.0],
        reward_model=[[9.0, 2.0, 6.0], [9.0, 8.0, 1.0]],
        reference=[[7.0, 0.0, 0.0], [7.0, 0.0, 1.0]],
    )
    ours_N = advantages(batch, AlgorithmConfig(advantage="prime", prm_beta=0.5, gamma=0.5))
    assert ours_N.tolist() == pytest.approx([0, -0.5 + 1, 1 + 1, 0, 1 - 1, -2 - 1])


def test_distillation_is_the_teacher_against_the_policy() -> None:
    batch = tokens_batch(
        ["0110"], [5.0], behaviour=[[0.0, -1.0, -2.0, 0.0]], teacher=[[9.0, -3.0, -1.5, 9.0]]
    )
    assert advantages(batch, AlgorithmConfig(advantage="distill")).tolist() == [0, -2, 0.5, 0]
    stale = batch.with_columns(proximal=batch.behaviour_N + 1)
    assert advantages(stale, AlgorithmConfig(advantage="distill")).tolist() == [0, -3, -0.5, 0]


@pytest.mark.parametrize(
    ("literal", "column"),
    [("gae", "values"), ("vapo", "values"), ("prime", "reward_model"), ("distill", "teacher")],
)
def test_a_missing_column_is_named(literal: str, column: str) -> None:
    batch = tokens_batch(["011"], [1.0])
    with pytest.raises(TrainingError, match=f"lack the column '{column}'"):
        advantages(batch, AlgorithmConfig(advantage=literal))


def test_a_missing_cost_is_named() -> None:
    batch = tokens_batch(["011"], [1.0], values=[[0.0] * 3], cost_values=[[0.0] * 3])
    with pytest.raises(TrainingError, match="lack the reward part 'cost'"):
        advantages(batch, AlgorithmConfig(advantage="safe_rlhf"))


def test_advantages_without_a_critic_have_no_targets() -> None:
    batch = tokens_batch(["011"], [1.0]).with_columns(values=flat_column("values", [[0.0] * 3]))
    assert value_targets(batch, AlgorithmConfig(advantage="grpo")) == {}
