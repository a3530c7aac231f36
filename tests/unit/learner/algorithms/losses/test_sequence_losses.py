"""Losses of whole rollouts, by hand."""

from __future__ import annotations

from math import exp, log, sqrt

import pytest
import torch
from learner_cases import ORACLE, flat, oracle_batch
from loss_cases import aggregated, f64, outcome, terms_of, tokens

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.losses.policy_loss import policy_loss


def config(loss: str, low: float = 0.2, high: float = 0.28) -> AlgorithmConfig:
    return AlgorithmConfig(loss=loss, clip_low=low, clip_high=high)


def test_gspo_gives_every_token_the_geometric_mean_of_the_ratios() -> None:
    # rollout 0: sqrt(0.8 · 1.8) = 1.2, inside; rollout 1: 2, clipped for A > 0
    got = outcome(tokens([0.8, 1.8, 2.0], [1.0, 1.0, 1.0], seq=[0, 0, 1]), config("gspo"))
    assert got.loss == pytest.approx([-1.2, -1.2, -1.28])
    assert got.slope == pytest.approx([-1.2, -1.2, 0.0])
    assert got.clipped == [False, False, True]


def test_gspo_does_not_clip_what_moves_back() -> None:
    got = outcome(tokens([2.0, 0.5], [-1.0, 1.0], seq=[0, 1]), config("gspo"))
    assert got.slope == pytest.approx([2.0, -0.5])


def test_gmpo_clips_each_token_before_the_mean() -> None:
    # log 2 is clipped to 0.28: exp((0.28 + log 0.9) / 2); a token's slope is its part of the mean, of 2 losses
    ratio = sqrt(exp(0.28) * 0.9)
    got = outcome(tokens([2.0, 0.9], [1.5, 1.5]), config("gmpo"))
    assert got.loss == pytest.approx([-1.5 * ratio] * 2)
    assert got.slope == pytest.approx([0.0, -1.5 * ratio])
    assert got.clipped == [True, False]


def test_gmpo_does_not_clip_what_moves_back() -> None:
    got = outcome(tokens([2.0, 0.5], [-1.5, -1.5]), config("gmpo"))
    ratio = sqrt(2.0 * exp(-0.2))
    assert got.loss == pytest.approx([1.5 * ratio] * 2)
    assert got.slope == pytest.approx([1.5 * ratio, 0.0])


def test_sppo_pulls_the_log_ratio_of_a_rollout_to_its_target() -> None:
    # rollout 0 has moved by log 1.5 + log 2 = log 3, target 0.5; rollout 1 by log 1 = 0, target −0.25
    got = outcome(tokens([1.5, 2.0, 1.0], [0.5, 0.5, -0.25], seq=[0, 0, 1]), config("sppo"))
    first, second = log(3.0) - 0.5, 0.25
    assert got.loss == pytest.approx([first**2 / 2, first**2 / 2, second**2])
    assert got.slope == pytest.approx([2 * first, 2 * first, 2 * second])


def test_sppo_is_a_mean_over_rollouts_and_skips_what_the_policy_did_not_make() -> None:
    batch = oracle_batch()
    mask_R9, rewards_R = f64(ORACLE["inputs"]["mask"]), f64(ORACLE["inputs"]["reward_baselines"])
    logp_N, old_N = flat(ORACLE["inputs"]["log_prob"]), flat(ORACLE["inputs"]["old_log_prob"])
    batch = batch.with_advantages(rewards_R[batch.seq_N])
    got = aggregated(policy_loss(terms_of(batch, logp_N), config("sppo")).loss_N, batch, "seq-mean-token-sum")
    moved_R = ((logp_N - old_N).reshape(12, 9) * mask_R9).sum(1)
    assert got.item() == pytest.approx(((moved_R - rewards_R) ** 2).mean().item())


@pytest.mark.parametrize("loss", ["gspo", "gmpo", "sppo"])
def test_rollouts_do_not_touch_each_other(loss: str) -> None:
    alone = outcome(tokens([0.9, 1.1], [1.0, 1.0]), config(loss))
    beside = outcome(tokens([0.9, 1.1, 3.0], [1.0, 1.0, -1.0], seq=[0, 0, 1]), config(loss))
    assert beside.loss[:2] == pytest.approx(alone.loss)
    assert beside.slope[:2] == pytest.approx(alone.slope)


def test_gmpo_is_the_mean_over_rollouts_of_advantage_times_ratio() -> None:
    batch = oracle_batch()
    mask_R9 = f64(ORACLE["inputs"]["mask"])
    logp_N, advantages_N = flat(ORACLE["inputs"]["log_prob"]), flat(ORACLE["inputs"]["advantages"])
    got = aggregated(
        policy_loss(terms_of(batch, logp_N), config("gmpo")).loss_N, batch, "seq-mean-token-mean"
    )
    log_rho_R9 = (logp_N - flat(ORACLE["inputs"]["old_log_prob"])).reshape(12, 9)
    a_R9 = advantages_N.reshape(12, 9)
    held_R9 = torch.where(a_R9 > 0, log_rho_R9.clamp(max=0.28), log_rho_R9.clamp(min=-0.2))
    length_R = mask_R9.sum(1)
    ratio_R = ((held_R9 * mask_R9).sum(1) / length_R).exp()
    a_R = (a_R9 * mask_R9).sum(1) / length_R
    assert got.item() == pytest.approx((-a_R * ratio_R).mean().item(), rel=1e-6)
