"""The terms beside the policy loss, and the proximal policy that costs no forward pass."""

from __future__ import annotations

import dataclasses
from math import exp, log

import pytest
import torch
from advantage_cases import on_ranks, tokens_batch
from loss_cases import aggregated, f64

from asyncrl.config.sections.algorithm import AlgorithmConfig, KlLossConfig
from asyncrl.errors import TrainingError
from asyncrl.learner.algorithms.losses.aggregation import AGGREGATIONS, lm_weights
from asyncrl.learner.algorithms.losses.policy_loss import forward_kl, loglinear_proximal
from asyncrl.learner.algorithms.registry import Gather, alone, needs
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.training.objectives import other_terms

MASKS, REWARDS = ["0110", "0111", "0100"], [1.0, 0.5, 0.75]
LOGP = [0, -1, -2, 0, 0, -4, -5, -6, 0, -7, 0, 0]
"""Rollouts 0 and 2, with more than ½, have succeeded: −log π of 1, 2 and 7, mean 10/3."""


def batch_of(masks: list[str] = MASKS, rewards: list[float] = REWARDS) -> MicroBatch:
    """Shaping has taken 10 off each reward, which is no matter here."""
    batch = tokens_batch(masks, [reward - 10 for reward in rewards])
    return batch.with_columns(outcome=torch.tensor(rewards)[batch.seq_N])


def terms(logp_N: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig) -> torch.Tensor:
    return other_terms(logp_N, torch.full_like(logp_N, 2.0), batch, config)


def test_the_forward_kl_has_all_other_tokens_as_one() -> None:
    """p = ½, ¼, the rest ¼; π = ⅛, ⅛, the rest ¾; and a token that the teacher rules out."""
    teacher_NO = f64([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]).log()
    mine_NO = f64([[0.125, 0.125, 0.75], [0.5, 0.25, 0.25]]).log()
    expected = [0.5 * log(4) + 0.25 * log(2) + 0.25 * log(1 / 3), log(2)]
    assert forward_kl(mine_NO, teacher_NO).tolist() == pytest.approx(expected)


def test_entropy_is_a_bonus() -> None:
    batch = tokens_batch(["01"], [0.0])
    got_N = terms(f64([0.0, -1.0]), batch, AlgorithmConfig(entropy_bonus=0.1))
    assert got_N.tolist() == pytest.approx([-0.2, -0.2])


def test_kl_takes_form_and_coefficient() -> None:
    batch = tokens_batch(["01"], [0.0], reference=[[0.0, -1.0]])
    config = AlgorithmConfig(kl_loss=KlLossConfig(0.5, "k2"))
    assert terms(f64([0.0, -3.0]), batch, config).tolist() == [0.0, 1.0]  # ½ · ½ · 2²


@pytest.mark.parametrize(
    ("form", "slope"), [("k1", 1), ("k2", -1), ("k3", 1 - exp(1)), ("k1+", -1), ("k3+", -1), ("abs+", -1)]
)
@pytest.mark.parametrize("outside", [float("nan"), float("inf"), -1e30])
def test_what_a_reference_says_outside_the_mask_has_no_gradient(
    form: str, slope: float, outside: float
) -> None:
    batch = tokens_batch(["01"], [0.0], reference=[[outside, -1.0]])
    logp_N = f64([0.0, -2.0]).requires_grad_()
    term_N = terms(logp_N, batch, AlgorithmConfig(kl_loss=KlLossConfig(1.0, form)))
    (slope_N,) = torch.autograd.grad(torch.where(batch.loss_mask_N, term_N, 0.0).sum(), logp_N)
    assert slope_N.tolist() == pytest.approx([0.0, slope])
    assert term_N[0] == 0


@pytest.mark.parametrize(
    "config",
    [
        AlgorithmConfig(kl_loss=KlLossConfig(1.0)),
        AlgorithmConfig(lm_coef=1.0),
    ],
)
def test_a_batch_without_the_column_is_refused(config: AlgorithmConfig) -> None:
    with pytest.raises(TrainingError, match="column"):
        terms(f64([0.0, 0.0]), tokens_batch(["01"], [1.0]), config)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_the_lm_loss_is_a_mean_over_the_tokens_that_succeeded(aggregation: str) -> None:
    config = AlgorithmConfig(aggregation=aggregation, lm_coef=0.1)
    batch = batch_of()
    batch = batch.with_columns(lm=lm_weights(batch, config, 9, alone))
    loss = aggregated(terms(f64(LOGP), batch, config), batch, aggregation)
    assert loss.item() == pytest.approx(0.1 * 10 / 3, rel=1e-6)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_the_lm_loss_counts_copies(aggregation: str) -> None:
    config = AlgorithmConfig(aggregation=aggregation, lm_coef=1.0)
    batch = dataclasses.replace(batch_of(), copies_R=torch.tensor([0.0, 1.0, 3.0]))
    batch = batch.with_columns(lm=lm_weights(batch, config, 9, alone))
    assert aggregated(terms(f64(LOGP), batch, config), batch, aggregation).item() == pytest.approx(7.0)


def test_the_lm_loss_knows_of_other_ranks() -> None:
    config, batch = AlgorithmConfig(lm_coef=1.0), batch_of()
    parts = [[1], [0, 2]]

    def work(rank: int, gather: Gather) -> torch.Tensor:
        return lm_weights(batch.select(parts[rank]), config, 9, gather)

    whole_N = lm_weights(batch, config, 9, alone)
    for part, got_N in zip(parts, on_ranks(2, work), strict=True):
        assert (got_N == whole_N[batch.tokens_of(part)]).all()


def test_the_lm_loss_counts_beyond_what_float32_can() -> None:
    """With 2²⁴ tokens of another rank, and no success there: the 3 of this one weigh (2²⁴ + 6) / 3 each."""
    elsewhere = torch.tensor([2.0**24, 1, 0], dtype=torch.float64)
    got_N = lm_weights(batch_of(), AlgorithmConfig(lm_coef=1.0), 9, lambda mine: [mine, elsewhere])
    assert got_N.max() == (2**24 + 6) / 3


def test_without_success_there_is_no_lm_loss() -> None:
    batch = batch_of(["01", "011"], [0.5, -1.0])
    assert not lm_weights(batch, AlgorithmConfig(lm_coef=1.0), 9, alone).any()


def test_the_lm_loss_waits_for_the_whole_batch() -> None:
    assert "batch" in needs(AlgorithmConfig(lm_coef=0.1))
    assert "batch" not in needs(AlgorithmConfig())


# --- the proximal policy


@pytest.mark.parametrize(("born", "alpha"), [(10, 0.0), (9, 0.0), (8, 0.5), (6, 0.75)])
def test_loglinear_proximal_lies_one_version_back_on_the_line(born: int, alpha: float) -> None:
    logp_N = f64([-3.0]).requires_grad_()
    got_N = loglinear_proximal(f64([-1.0]), logp_N, torch.tensor([born], dtype=torch.int32), version=10)
    assert got_N.item() == pytest.approx(-1.0 - 2 * alpha)
    assert not got_N.requires_grad
