"""The policy's objective: loss, correction, terms and aggregation put together."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from advantage_cases import tokens_batch
from learner_cases import ORACLE, flat, oracle_batch, random_group

from asyncrl.config.sections.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    KlLossConfig,
    TeacherLossConfig,
)
from asyncrl.errors import TrainingError
from asyncrl.learner.algorithms.losses.aggregation import AGGREGATIONS, Counts
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.training.objectives import PolicyObjective
from asyncrl.learner.training.passes import PADDING

VERL = AlgorithmConfig(loss="ppo", dual_clip=3.0)


def test_measures_what_the_oracle_measures() -> None:
    logp_N = flat(ORACLE["inputs"]["log_prob"])
    _, metrics = PolicyObjective(VERL, 9)(oracle_batch(), logp_N, torch.zeros_like(logp_N))
    values, plain = metrics.values(), ORACLE["correction"]["is=token|th=2.0|bn=False"]
    expected = ORACLE["loss"]["vanilla|token-mean|is=False"]["clipped"]
    assert values["train/clip_fraction"] == pytest.approx(expected, abs=1e-6)
    assert values["train/approx_kl_k1"] == pytest.approx(plain["k1"], abs=1e-6)
    assert values["train/approx_kl"] == pytest.approx(plain["k3"], abs=1e-6)
    assert values["train/effective_sample_size"] == pytest.approx(plain["ess"], abs=1e-6)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("proximal", ["behaviour", "frozen", "loglinear"])
def test_any_split_of_a_batch_gives_the_gradient_of_the_whole(aggregation: str, proximal: str) -> None:
    batch = oracle_batch().with_columns(reference=flat(ORACLE["inputs"]["ref_log_prob"]))
    config = AlgorithmConfig(
        aggregation=aggregation,
        proximal=proximal,
        entropy_bonus=0.1,
        kl_loss=KlLossConfig(0.2, "k3+"),
        correction=CorrectionConfig("tis", "sequence", reject="seq_mean_k3"),
    )
    objective = PolicyObjective(config, norm_tokens=9)
    logp_N = flat(ORACLE["inputs"]["log_prob"]).requires_grad_()

    def gradient(parts: list[list[int]]) -> torch.Tensor:
        total, counts = torch.zeros(()).double(), Counts()
        for part in parts:
            piece, at_N = batch.select(part), batch.tokens_of(part)
            total = total + objective(piece, logp_N[at_N], logp_N[at_N].exp(), version=4)[0]
            counts += Counts.of(piece)
        return torch.autograd.grad(total / objective.denominator(counts), logp_N)[0]

    whole_N = gradient([list(range(12))])
    split_N = gradient([[11, 0], [3, 4, 5, 7], [1], [2, 6, 8, 9, 10]])
    assert whole_N.abs().sum() > 0
    torch.testing.assert_close(whole_N, split_N, atol=1e-12, rtol=0)


@pytest.mark.parametrize("form", ["k2", "k1+", "k3+", "abs+"])
def test_a_teacher_in_the_loss_has_the_gradient_of_the_policy_gradient_to_it(form: str) -> None:
    """∇ ½ (log π − log q)² = −(log q − log π) ∇ log π, with the same off-policy weights and rejections."""
    logp_N = flat(ORACLE["inputs"]["log_prob"]).requires_grad_()
    teacher_N = flat(ORACLE["inputs"]["ref_log_prob"])
    batch = oracle_batch().with_columns(teacher=teacher_N, proximal=logp_N.detach())
    batch = dataclasses.replace(batch, advantages_N=teacher_N - logp_N.detach())
    shared = {
        "advantage": "distill",
        "proximal": "frozen",
        "correction": CorrectionConfig("tis", reject="seq_mean_k3"),
    }

    def gradient(**keys: Any) -> torch.Tensor:
        objective = PolicyObjective(AlgorithmConfig(**shared, **keys), norm_tokens=9)
        return torch.autograd.grad(objective.total(batch, logp_N, torch.zeros(108)), logp_N)[0]

    by_term_N = gradient(loss="none", teacher_loss=TeacherLossConfig(0.5, form))  # type: ignore[arg-type]
    assert by_term_N.abs().sum() > 0
    torch.testing.assert_close(by_term_N, 0.5 * gradient(loss="reinforce"), atol=1e-12, rtol=0)


TAUGHT = AlgorithmConfig(
    loss="none",
    teacher_loss=TeacherLossConfig(0.5, "topk", top_k=2),
    aggregation="seq-mean-token-sum",
    proximal="frozen",
    correction=CorrectionConfig("tis", high=2.0),
)


def test_the_teachers_most_likely_tokens_are_weighed_and_summed() -> None:
    """By hand: p = ½, ¼ and ¼ for all others, π = ¼, ¼, ½ at each policy token, the first of which has the weight 2."""
    batch = MicroBatch.of([random_group(0, size=1)])
    at_P = torch.nonzero(batch.loss_mask_N)[:, 0]
    teacher_NO = torch.full((batch.tokens, 3), 0.3)  # no log-probs at all outside the mask
    mine_NO = torch.full((batch.tokens, 3), torch.inf)
    teacher_NO[at_P] = torch.tensor([0.5, 0.25, 0.25]).log()
    mine_NO[at_P] = torch.tensor([0.25, 0.25, 0.5]).log()
    logp_N = batch.behaviour_N.clone()
    logp_N[at_P[0]] += 1  # π/μ = e, truncated to 2
    batch = batch.with_columns(teacher_likeliest=teacher_NO)
    total, metrics = PolicyObjective(TAUGHT, 9)(batch, logp_N, torch.zeros_like(logp_N), mine_NO)
    each = 0.5 * math.log(2) + 0.25 * math.log(0.25 / 0.5)
    assert float(total) == pytest.approx(0.5 * each * (len(at_P) + 1))
    found = metrics.values()
    assert (found["train/teacher/mass"], found["train/teacher/policy_mass"]) == pytest.approx((0.75, 0.5))


def test_padding_of_a_rank_without_rollouts_has_no_outcomes() -> None:
    total, metrics = PolicyObjective(TAUGHT, 9)(PADDING, torch.zeros(1), torch.zeros(1), torch.zeros(1, 3))
    assert float(total) == 0
    assert "train/teacher/mass" not in metrics.values()


def test_the_teachers_most_likely_tokens_are_missed() -> None:
    batch = oracle_batch()
    with pytest.raises(TrainingError, match="teacher_likeliest"):
        PolicyObjective(TAUGHT, 9).total(batch, batch.behaviour_N, batch.behaviour_N, torch.zeros(108, 3))
    with pytest.raises(TrainingError, match="the backend gives no log-probs"):
        PolicyObjective(TAUGHT, 9).total(batch, batch.behaviour_N, batch.behaviour_N)


def test_a_batch_without_the_teacher_is_refused() -> None:
    objective = PolicyObjective(AlgorithmConfig(loss="none", teacher_loss=TeacherLossConfig(1.0)), 9)
    with pytest.raises(TrainingError, match="column"):
        objective.total(oracle_batch(), flat(ORACLE["inputs"]["log_prob"]), torch.zeros(108))


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize(
    ("loss", "level", "whole"),
    [
        ("ppo", "token", False),
        ("ppo", "sequence", True),
        ("gspo", "token", True),
        ("gmpo", "token", True),
        ("sppo", "token", True),
    ],
)
def test_segments_are_trained_apart_where_the_loss_is_a_sum_over_tokens(
    aggregation: str, loss: str, level: str, whole: bool
) -> None:
    batch = dataclasses.replace(oracle_batch(), position_ids_N=torch.arange(3).repeat(36))
    batch = batch.with_columns(kept=torch.arange(108) % 7 > 0)
    correction = CorrectionConfig("tis", level)  # type: ignore[arg-type]
    config = AlgorithmConfig(loss=loss, aggregation=aggregation, proximal="loglinear", correction=correction)  # type: ignore[arg-type]
    objective = PolicyObjective(config, norm_tokens=9)
    logp_N = flat(ORACLE["inputs"]["log_prob"])
    total, _ = objective(batch, logp_N, torch.zeros(108), version=4)
    parts = objective.divided(batch)
    assert parts.rollouts == (12 if whole else 36)
    pieces = [range(0, parts.rollouts, 3), range(1, parts.rollouts, 3), range(2, parts.rollouts, 3)]
    sums = []
    for some in pieces:
        mine_N = logp_N[parts.tokens_of(some)]
        sums.append(objective(parts.select(some), mine_N, torch.zeros_like(mine_N), version=4)[0])
    assert float(total) != 0
    torch.testing.assert_close(sum(sums), total, atol=1e-12, rtol=0)


@pytest.mark.parametrize("place", ["computed", "column"])
@pytest.mark.parametrize(
    ("loss", "weights", "slopes"),
    [
        ("ppo", [0.5, 2.0], [-0.5, -2.0]),
        ("gmpo", [0.5, 2.0], [-1.0, -1.0]),  # √(½ · 2)
        ("gmpo", [4.0, 2.25], [-3.0, -3.0]),
        ("gmpo", [0.1, 2.0], [0.0, 0.0]),  # 0.1 is cut out, and with it the rollout
    ],
)
def test_gmpo_weighs_a_rollout_by_the_geometric_mean(
    loss: str, weights: list[float], slopes: list[float], place: str
) -> None:
    """Two policy tokens with ρ = A = 1, beside a rollout of one with the weight 1."""
    log_w = [[0.0, *map(math.log, weights)], [0.0, 0.0]]
    batch = tokens_batch(["011", "01"], [0.0] * 2, behaviour=[[-x for x in each] for each in log_w])
    batch = batch.with_advantages(torch.ones(5))
    if place == "column":
        kept = [w if w >= 0.5 else 0.0 for w in weights]
        batch = batch.with_columns(weight=torch.tensor([float("nan"), *kept, float("nan"), 1.0]))
    correction = CorrectionConfig("icepop" if place == "computed" else "none", low=0.4, high=9.0)
    config = AlgorithmConfig(loss=loss, proximal="frozen", aggregation="token-sum", correction=correction)
    logp_N = torch.zeros(5, requires_grad=True)
    total, metrics = PolicyObjective(config, 9)(batch, logp_N, torch.zeros(5))
    (slope_N,) = torch.autograd.grad(total, logp_N)
    assert total.dtype == logp_N.dtype
    assert total.item() == pytest.approx(sum(slopes) - 1.0)
    assert slope_N.tolist() == pytest.approx([0.0, *slopes, 0.0, -1.0])
    assert metrics.values()["train/zero_weight_fraction"] == pytest.approx(slopes.count(0.0) / 3)


def test_rejected_tokens_have_no_gradient_and_all_others_have_one() -> None:
    batch = oracle_batch().with_advantages(torch.ones(108))
    kept_N = torch.arange(108) % 3 > 0
    logp_N = flat(ORACLE["inputs"]["old_log_prob"]).requires_grad_()
    objective = PolicyObjective(AlgorithmConfig(loss="reinforce"), 9)
    total, _ = objective(batch.with_columns(kept=kept_N), logp_N, torch.zeros(108))
    (gradient_N,) = torch.autograd.grad(total, logp_N)
    assert torch.equal(gradient_N != 0, batch.loss_mask_N & kept_N)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_a_batch_without_policy_tokens_is_divided_by_one(aggregation: str) -> None:
    assert PolicyObjective(AlgorithmConfig(aggregation=aggregation), 9).denominator(Counts()) == 1.0


def test_what_stands_outside_the_mask_cannot_spoil_the_loss() -> None:
    batch = oracle_batch()
    logp_N = flat(ORACLE["inputs"]["log_prob"])
    spoiled_N = torch.where(batch.loss_mask_N, logp_N, torch.inf)
    total, _ = PolicyObjective(VERL, 9)(batch, spoiled_N, torch.zeros_like(logp_N))
    assert total.isfinite()
