from __future__ import annotations

import dataclasses
from typing import get_args, get_type_hints

import pytest
import torch
from learner_cases import ORACLE, flat, oracle_batch

from asyncrl.config.schema import AlgorithmConfig, CorrectionConfig
from asyncrl.learner.aggregation import AGGREGATIONS, Counts
from asyncrl.learner.losses import LOSSES, PolicyTerms, TokenLoss
from asyncrl.learner.objective import Objective, with_ratio_summary

VERL = AlgorithmConfig(loss="ppo", dual_clip=3.0)


def one_token(
    loss: str, advantage: float, ratio: float, config: AlgorithmConfig
) -> tuple[float, float, bool]:
    """(loss, its derivative by log π, clipped) of a single token with log π_p = -1."""
    logp_N = torch.tensor([-1.0], dtype=torch.float64) + torch.tensor([ratio]).double().log()
    logp_N.requires_grad_()
    minus_one_N = torch.tensor([-1.0], dtype=torch.float64)
    terms = PolicyTerms(
        logp_N,
        minus_one_N,
        torch.tensor([advantage], dtype=torch.float64),
        torch.ones(1, dtype=torch.bool),
        torch.zeros(1, dtype=torch.int64),
        1,
    )
    got: TokenLoss = LOSSES[loss](terms, config)
    (slope_N,) = torch.autograd.grad(got.loss_N.sum(), logp_N)
    return got.loss_N.item(), slope_N.item(), bool(got.clipped_N)


def test_every_literal_has_a_loss_and_an_aggregation() -> None:
    hints = get_type_hints(AlgorithmConfig)
    assert set(get_args(hints["loss"])) == set(LOSSES)
    assert set(get_args(hints["aggregation"])) == set(AGGREGATIONS)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [
        (2.0, 1.0, (-2.0, -2.0, False)),
        (2.0, 1.25, (-2.5, -2.5, False)),  # inside clip-higher
        (2.0, 1.5, (-2.56, 0.0, True)),  # 1.28 · 2
        (2.0, 0.5, (-1.0, -1.0, False)),  # moving back is never clipped
        (-2.0, 0.5, (1.6, 0.0, True)),  # 0.8 · 2
        (-2.0, 2.5, (5.0, 5.0, False)),
        (-2.0, 4.0, (6.0, 0.0, True)),  # dual clip at 3 · 2
    ],
)
def test_ppo_by_hand(advantage: float, ratio: float, expected: tuple[float, float, bool]) -> None:
    assert one_token("ppo", advantage, ratio, VERL) == pytest.approx(expected)


def test_reinforce_by_hand() -> None:
    assert one_token("reinforce", 2.0, 1.0, VERL) == pytest.approx((2.0, -2.0, False))


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_ppo_agrees_with_the_oracle(aggregation: str) -> None:
    case = ORACLE["loss"][f"vanilla|{aggregation}|is=False"]
    batch = oracle_batch()
    logp_N = flat(ORACLE["inputs"]["log_prob"]).requires_grad_()
    objective = Objective(dataclasses.replace(VERL, aggregation=aggregation), norm_tokens=9)
    total, metrics = objective(batch, logp_N, torch.zeros_like(logp_N))
    loss = total / objective.denominator(Counts.of(batch))
    (grad_N,) = torch.autograd.grad(loss, logp_N)
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    torch.testing.assert_close(grad_N, flat(case["grad"]), atol=1e-6, rtol=0)
    values = with_ratio_summary(metrics.values())
    plain = ORACLE["correction"]["is=token|th=2.0|bn=False"]
    assert values["share/clipped"] == pytest.approx(case["clipped"], abs=1e-6)
    assert values["kl/k1"] == pytest.approx(plain["k1"], abs=1e-6)
    assert values["kl/k3"] == pytest.approx(plain["k3"], abs=1e-6)
    assert values["ratio/ess"] == pytest.approx(plain["ess"], abs=1e-6)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_aggregations_agree_with_the_oracle(aggregation: str) -> None:
    batch = oracle_batch()
    rule = AGGREGATIONS[aggregation]
    total = (rule.weights(batch, 9) * flat(ORACLE["inputs"]["advantages"])).sum()
    value = float(total / rule.denominator(Counts.of(batch)))
    assert value == pytest.approx(ORACLE["aggregation"][aggregation], abs=1e-6)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("proximal", ["behaviour", "current"])
def test_any_split_of_a_batch_gives_the_gradient_of_the_whole(aggregation: str, proximal: str) -> None:
    batch = oracle_batch()
    config = AlgorithmConfig(
        aggregation=aggregation,
        proximal=proximal,
        entropy_bonus=0.1,
        correction=CorrectionConfig(kind="tis", level="sequence"),
    )
    objective = Objective(config, norm_tokens=9)
    logp_N = flat(ORACLE["inputs"]["log_prob"]).requires_grad_()

    def gradient(parts: list[list[int]]) -> torch.Tensor:
        total, counts = torch.zeros(()).double(), Counts()
        for part in parts:
            piece = batch.select(part)
            where_N = torch.cat([torch.arange(9 * r, 9 * r + 9) for r in part])
            total = total + objective(piece, logp_N[where_N], logp_N[where_N].exp())[0]
            counts = Counts.total([counts, Counts.of(piece)])
        return torch.autograd.grad(total / objective.denominator(counts), logp_N)[0]

    whole = gradient([list(range(12))])
    split = gradient([[11, 0], [3, 4, 5, 7], [1], [2, 6, 8, 9, 10]])
    assert whole.abs().sum() > 0
    torch.testing.assert_close(whole, split, atol=1e-12, rtol=0)


def test_what_stands_outside_the_mask_cannot_spoil_the_loss() -> None:
    batch = oracle_batch()
    logp_N = flat(ORACLE["inputs"]["log_prob"])
    spoiled_N = torch.where(batch.loss_mask_N, logp_N, torch.inf).requires_grad_()
    total, _ = Objective(VERL, 9)(batch, spoiled_N, torch.zeros_like(logp_N))
    assert total.isfinite()
