"""Losses of single tokens by hand, all losses against the oracle, under any split, and with absurd input."""

from __future__ import annotations

import dataclasses
from math import exp, log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import ORACLE, flat, oracle_batch
from loss_cases import EVERY_LOSS, SELECTING, aggregated, outcome, terms_of, tokens, weighted_sum

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.losses.aggregation import AGGREGATIONS, Counts
from asyncrl.learner.algorithms.losses.covariance_losses import select_covariance
from asyncrl.learner.algorithms.losses.policy_loss import policy_loss
from asyncrl.learner.algorithms.registry import AlgorithmContext
from asyncrl.learner.data.batch import MicroBatch

VERL = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


def by_hand(loss: str, advantage: float, ratio: float, log_mu: float = -1.0, **keys: float) -> list[float]:
    """[loss, derivative by log π, 1 if it was held back] of a single token with π_p = μ."""
    config = AlgorithmConfig(loss=loss, **(VERL | keys))
    got = outcome(tokens([ratio], [advantage], log_mu), config)
    return [got.loss[0], got.slope[0], float(got.clipped[0])]


# --- by hand


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [
        (2.0, 1.0, [-2.0, -2.0, 0]),
        (2.0, 1.25, [-2.5, -2.5, 0]),  # inside clip-higher
        (2.0, 1.5, [-2.56, 0.0, 1]),  # 1.28 · 2
        (2.0, 0.5, [-1.0, -1.0, 0]),  # moving back is never clipped
        (-2.0, 0.5, [1.6, 0.0, 1]),  # 0.8 · 2
        (-2.0, 2.5, [5.0, 5.0, 0]),
        (-2.0, 4.0, [6.0, 0.0, 1]),  # dual clip at 3 · 2
    ],
)
def test_ppo(advantage: float, ratio: float, expected: list[float]) -> None:
    assert by_hand("ppo", advantage, ratio) == pytest.approx(expected)


def test_decoupled_ppo_weighs_ppo_around_the_proximal_policy() -> None:
    config = AlgorithmConfig(loss="decoupled_ppo", weight_cap=5.0)
    for log_w, weight in ((log(0.5), 0.5), (log(8.0), 5.0)):
        terms = tokens([1.25, 1.5], [2.0, 2.0], log_mu=-1.0 - log_w, log_proximal=-1.0)
        got = outcome(terms, config)
        assert got.loss == pytest.approx([weight * -2.5, weight * -2.56])
        assert got.slope == pytest.approx([weight * -2.5, 0.0])
        assert got.clipped == [False, True]


@pytest.mark.parametrize(
    ("advantage", "ratio", "weight"),
    [(2.0, 1.1, 1.1), (2.0, 3.0, 1.28), (-2.0, 0.1, 0.8), (-2.0, 3.0, 1.28)],
)
def test_cispo_bounds_the_weight_and_keeps_the_gradient(
    advantage: float, ratio: float, weight: float
) -> None:
    log_pi = -1.0 + log(ratio)
    expected = [-weight * advantage * log_pi, -weight * advantage, float(weight != ratio)]
    assert by_hand("cispo", advantage, ratio) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("advantage", "ratio", "tau"), [(2.0, 1.5, 1.0), (-2.0, 0.5, 1.05), (-2.0, 3.0, 1.05)]
)
def test_sapo_is_a_sigmoid_gate(advantage: float, ratio: float, tau: float) -> None:
    gate = 1 / (1 + exp(-tau * (ratio - 1)))
    slope = -advantage * 4 * gate * (1 - gate) * ratio  # dρ/dlog π = ρ
    assert by_hand("sapo", advantage, ratio) == pytest.approx([-advantage * 4 / tau * gate, slope, 0])


def test_sapo_has_the_gradient_of_reinforce_where_the_policies_are_the_same() -> None:
    assert by_hand("sapo", 2.0, 1.0)[1] == pytest.approx(-2.0)
    assert by_hand("sapo", -2.0, 1.0)[1] == pytest.approx(2.0)


@pytest.mark.parametrize(("ratio", "weight"), [(0.01, 0.01), (4.0, 4.0), (7.0, 5.0)])
def test_aipo_is_bounded_on_one_side(ratio: float, weight: float) -> None:
    expected = [weight * 2 * (-1 + log(ratio)), weight * 2, float(ratio > 5)]
    assert by_hand("aipo", -2.0, ratio, weight_cap=5.0) == pytest.approx(expected)


def test_aipo_and_dppo_do_not_look_at_the_proximal_policy() -> None:
    for loss in ("aipo", "dppo_tv", "dppo_kl"):
        config = AlgorithmConfig(loss=loss)
        here, there = (tokens([ratio], [1.0], -1.0, -1.0 - log(ratio / 1.5)) for ratio in (1.5, 1.9))
        assert outcome(here, config).loss == pytest.approx(outcome(there, config).loss)


def test_reinforce() -> None:
    assert by_hand("reinforce", 2.0, 1.0) == pytest.approx([2.0, -2.0, 0])


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [
        (2.0, 1.0, [2.0, -2.0, 0]),
        (2.0, 4.0, [-2 * (log(4) - 1) + 0.25 * log(4) ** 2, -2 + 0.5 * log(4), 0]),
        (-2.0, 0.5, [2 * (log(0.5) - 1) + 0.25 * log(0.5) ** 2, 2 + 0.5 * log(0.5), 0]),
        (0.0, 4.0, [0.25 * log(4) ** 2, 0.5 * log(4), 0]),  # drawn back without an advantage, too
    ],
)
def test_dro_is_quadratic_in_the_log_ratio(advantage: float, ratio: float, expected: list[float]) -> None:
    assert by_hand("dro", advantage, ratio, dro_beta=0.5) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mu", "pi", "advantage", "held"),
    [
        (0.4, 0.7, 1.0, True),  # 0.3 up, wants up
        (0.4, 0.7, -1.0, False),  # wants back
        (0.4, 0.1, -1.0, True),  # 0.3 down, wants down
        (0.4, 0.1, 1.0, False),
        (0.4, 0.55, 1.0, False),  # 0.15 is inside the bound
        (0.001, 0.01, 1.0, False),  # ten times as likely, and still near: what ppo would clip
    ],
)
def test_dppo_tv_masks_what_moves_on_outward(mu: float, pi: float, advantage: float, held: bool) -> None:
    got = by_hand("dppo_tv", advantage, pi / mu, log(mu), dppo_bound=0.2, weight_cap=20.0)
    slope = 0.0 if held else -advantage * pi / mu
    assert got == pytest.approx([slope * log(pi), slope, float(held)])


@pytest.mark.parametrize(("bound", "held"), [(0.193, False), (0.191, True)])
def test_dppo_kl_measures_the_sampled_token_against_all_others(bound: float, held: bool) -> None:
    # μ = 0.4, π = 0.7: 0.4 log(4/7) + 0.6 log(0.6/0.3) = −0.22385 + 0.41589 = 0.19204; of π to μ it is 0.18379
    assert by_hand("dppo_kl", 1.0, 0.7 / 0.4, log(0.4), dppo_bound=bound)[2] == float(held)
    assert by_hand("dppo_kl", -1.0, 0.7 / 0.4, log(0.4), dppo_bound=bound)[2] == 0.0


def test_dppo_truncates_the_weight_of_what_it_keeps() -> None:
    got = by_hand("dppo_tv", 1.0, 10.0, log(0.001), weight_cap=3.0)
    assert got == pytest.approx([-3.0 * log(0.01), -3.0, 0])


# --- against the oracle


@pytest.mark.parametrize("case", sorted(ORACLE["loss"]))
def test_agrees_with_the_oracle(case: str) -> None:
    name, aggregation, weighted = case.split("|")
    config = AlgorithmConfig(loss="ppo" if name == "vanilla" else name, **VERL)
    batch = oracle_batch()
    logp_N = flat(ORACLE["inputs"]["log_prob"]).requires_grad_()
    loss_N, clipped_N = policy_loss(terms_of(batch, logp_N), config)
    if weighted == "is=True":
        loss_N = loss_N * flat(ORACLE["inputs"]["is_weights"])
    loss = aggregated(loss_N, batch, aggregation)
    (grad_N,) = torch.autograd.grad(loss, logp_N)
    expected = ORACLE["loss"][case]
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    torch.testing.assert_close(grad_N, flat(expected["grad"]), atol=1e-6, rtol=0)
    share = clipped_N[batch.loss_mask_N].double().mean().item()
    assert share == pytest.approx(expected["clipped"], abs=1e-6)


# --- any split


@st.composite
def splits(draw: st.DrawFn, rollouts: int = 12) -> list[list[int]]:
    order = draw(st.permutations(range(rollouts)))
    cuts = sorted(draw(st.sets(st.integers(1, rollouts - 1), max_size=5)))
    return [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, rollouts], strict=True)]


@pytest.mark.parametrize("loss", EVERY_LOSS)
@settings(max_examples=12, deadline=None)
@given(
    parts=splits(),
    aggregation=st.sampled_from(sorted(AGGREGATIONS)),
    copies=st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_any_split_gives_the_gradient_of_the_whole(
    loss: str, parts: list[list[int]], aggregation: str, copies: list[int]
) -> None:
    """Over micro-batches or over ranks: either is a sum over parts and one division by the counts of all."""
    batch = dataclasses.replace(oracle_batch(), copies_R=torch.tensor(copies).float())
    config = AlgorithmConfig(loss=loss, cov_share=0.1, cov_range=(0.0, 9.0))
    logp_N = flat(ORACLE["inputs"]["log_prob"]).requires_grad_()
    proximal_N = flat(ORACLE["inputs"]["ref_log_prob"])
    selected_N = torch.zeros_like(batch.loss_mask_N)
    if loss in SELECTING:
        selected_N = select_covariance(batch, logp_N.detach(), proximal_N, config, AlgorithmContext())
        assert selected_N.any()

    def gradient(parts: list[list[int]]) -> torch.Tensor:
        total, counts = torch.zeros(()).double(), Counts()
        for part in parts:
            piece, at_N = batch.select(part), batch.tokens_of(part)
            terms = terms_of(piece, logp_N[at_N], proximal_N[at_N], selected_N[at_N])
            total = total + weighted_sum(policy_loss(terms, config).loss_N, piece, aggregation)
            counts += Counts.of(piece)
        denominator = max(1, AGGREGATIONS[aggregation].denominator(counts))
        return torch.autograd.grad(total / denominator, logp_N)[0]

    whole_N = gradient([list(range(12))])
    assert whole_N.abs().sum() > 0 or not any(copies)
    torch.testing.assert_close(gradient(parts), whole_N, atol=1e-12, rtol=1e-10)


# --- absurd input


@pytest.mark.parametrize("loss", EVERY_LOSS)
@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_absurd_log_ratios_and_what_stands_outside_the_mask_stay_finite(loss: str, shift: float) -> None:
    batch = oracle_batch()
    mask_N = batch.loss_mask_N
    moved_N = flat(ORACLE["inputs"]["log_prob"]) + shift * (torch.arange(108) % 2)
    logp_N = torch.where(mask_N, moved_N.clamp(max=0.0), torch.nan).requires_grad_()
    proximal_N = torch.where(mask_N, batch.behaviour_N + shift * (torch.arange(108) % 3), torch.inf)
    terms = terms_of(batch, logp_N, proximal_N, selected_N=mask_N)
    total = aggregated(policy_loss(terms, AlgorithmConfig(loss=loss)).loss_N, batch, "token-mean")
    (grad_N,) = torch.autograd.grad(total, logp_N)
    assert total.isfinite()
    assert grad_N.isfinite().all()
    assert (grad_N[~mask_N] == 0).all()


@pytest.mark.parametrize("loss", EVERY_LOSS)
@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_a_batch_without_policy_tokens_has_no_loss(loss: str, aggregation: str) -> None:
    batch = MicroBatch.empty()
    logp_N = torch.full((1,), torch.nan, requires_grad=True)
    terms = terms_of(batch, logp_N, selected_N=batch.loss_mask_N)
    got = aggregated(policy_loss(terms, AlgorithmConfig(loss=loss)).loss_N, batch, aggregation)
    assert got.item() == 0
    assert torch.autograd.grad(got, logp_N)[0].item() == 0
