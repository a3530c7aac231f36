"""Reward shaping before advantages are computed (`algorithm.shaping`).

    R ─▸ − overlong penalty ─▸ resampling by the result ─▸ − β · KL(policy‖reference) per token

The result is the column `token_rewards`, for estimators that look at tokens, rewards_R, their sums, for those that look
at rollouts, and copies_R.

Axes:  R rollouts · B rollouts of all ranks · N tokens
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig, ShapingConfig
from asyncrl.counter_rng import uniform
from asyncrl.learner.algorithms.losses.policy_loss import kl
from asyncrl.learner.algorithms.reductions import (
    column,
    place_in_group,
    policy_tokens,
    rollout_means,
    rollout_sums,
    token_rewards,
)
from asyncrl.learner.algorithms.registry import AlgorithmContext
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.telemetry.metrics import Mean, Metrics

MAX_KL_ERROR = 0.2
WEIGHT_FLOOR = 1e-8
RESAMPLING: Final = 1
"""Part of the counter of this module's draws, which keeps them distinct from others."""


def shape(
    batch: MicroBatch, config: AlgorithmConfig, max_tokens: int, kl_coef: float, context: AlgorithmContext
) -> tuple[MicroBatch, Metrics]:
    """The batch with token_rewards, rewards_R and copies_R as `config.shaping` defines them, and their metrics.

    kl_coef is β of this version. The KL is that of the policy at the version's start where its log-probs are known
    (the column `proximal`), else of the policy that made the tokens. Every rank must call where rollouts are resampled.
    Raises TrainingError where there is a KL but no column `reference`.
    """
    shaping, length_R = config.shaping, policy_tokens(batch)
    penalty_R = overlong_penalty(length_R, max_tokens, shaping.overlong_buffer, shaping.overlong_penalty)
    shaped = dataclasses.replace(batch, rewards_R=batch.rewards_R - penalty_R)
    if shaping.resample != "none":
        shaped = dataclasses.replace(shaped, copies_R=resampled_copies(shaped, shaping, context))
    kl_N = _kl_to_reference(batch, shaping) if shaping.kl_coef > 0 else torch.zeros(batch.tokens)
    rewards_N = token_rewards(shaped) - kl_coef * kl_N
    rewards_R = shaped.rewards_R.double() - kl_coef * rollout_sums(kl_N.double(), batch)
    shaped = dataclasses.replace(shaped, rewards_R=rewards_R.float())
    return shaped.with_columns(token_rewards=rewards_N.float()), _measured(shaped, kl_N, penalty_R, shaping)


def overlong_penalty(length_R: Tensor, max_tokens: int, buffer: int, factor: float) -> Tensor:
    """[R]: factor · clip((length − (max_tokens − buffer)) / buffer, 0, 1); 0 without a buffer.

    Soft overlong punishment; length in policy tokens. Source: DAPO, arXiv 2503.14476.
    """
    if buffer == 0:
        return torch.zeros(len(length_R))
    return factor * ((length_R - (max_tokens - buffer)) / buffer).clamp(0, 1)


def next_kl_coef(kl_coef: float, mean_kl: float, rollouts: int, shaping: ShapingConfig) -> float:
    """β after a version: β · (1 + clip(mean KL / target − 1, −0.2, 0.2) · min(1, rollouts / horizon)).

    mean_kl: over the rollouts of all ranks, of each one's mean over its tokens. Without `kl_target` β stays. The
    source has no min: its batches are small against the horizon, and a large one would carry β below 0.
    Source: Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593.
    """
    if shaping.kl_target is None:
        return kl_coef
    error = max(-MAX_KL_ERROR, min(MAX_KL_ERROR, mean_kl / shaping.kl_target - 1))
    return kl_coef * (1 + error * min(1.0, rollouts / shaping.kl_horizon))


def resampling_weights(rewards_B: Tensor, shaping: ShapingConfig) -> Tensor:
    """[B] float64: how likely each rollout of the batch is drawn, up to a common factor.

    pow: |R|^p · max_min: 1 for the best and the worst reward, else 0 · max_random: 0.4 for the best, else 0.1.
    Source: PF-PPO, arXiv 2409.06957. Nothing is quite impossible: 1e-8 is added, as in verl. (For pow verl adds it to
    |R|^p itself, here |R| is divided by the largest first.)
    """
    rewards_B = rewards_B.double()
    best_B = rewards_B == rewards_B.max()
    if shaping.resample == "max_min":
        weights_B = (best_B | (rewards_B == rewards_B.min())).double()
    elif shaping.resample == "max_random":
        weights_B = torch.where(best_B, 0.4, 0.1).double()
    else:
        largest = rewards_B.abs().max()  # a common factor, so that no power overflows
        weights_B = (rewards_B / torch.where(largest > 0, largest, 1.0)).abs() ** shaping.resample_power
    return weights_B + WEIGHT_FLOOR


def resampled_copies(batch: MicroBatch, shaping: ShapingConfig, context: AlgorithmContext) -> Tensor:
    """[R] float32: how often each rollout comes up in B draws with replacement from the B rollouts of all ranks.

    The draws depend on seed, rewards, ordinals and places in the group alone. Rollouts without a policy token are not
    drawn.
    """
    drawable_R = policy_tokens(batch) > 0
    place_R = torch.stack([batch.ordinals_R, place_in_group(batch)], 1)[drawable_R]
    rows_B = torch.cat(context.gather(torch.cat([place_R, batch.rewards_R[drawable_R, None]], 1).double()))
    copies_R = torch.zeros(batch.rollouts)
    if len(rows_B):
        rows_B = rows_B[np.lexsort((rows_B[:, 1].numpy(), rows_B[:, 0].numpy()))]
        draws_B = torch.from_numpy(uniform(*context.seed, RESAMPLING, np.arange(len(rows_B))))
        cumulative_B = resampling_weights(rows_B[:, 2], shaping).cumsum(0)
        drawn_B = torch.searchsorted(cumulative_B, draws_B * cumulative_B[-1], right=True)
        copies_B = torch.bincount(drawn_B, minlength=len(rows_B))
        copies = {tuple(place): float(n) for place, n in zip(rows_B[:, :2].tolist(), copies_B, strict=True)}
        copies_R[drawable_R] = torch.tensor([copies[tuple(place)] for place in place_R.tolist()])
    return copies_R


def _kl_to_reference(batch: MicroBatch, shaping: ShapingConfig) -> Tensor:
    """[N]: the estimate of each policy token, 0 outside the mask."""
    policy_N = batch.columns.get("proximal", batch.behaviour_N)
    kl_N = kl(policy_N, column(batch, "reference"), shaping.kl_form)
    return torch.where(batch.loss_mask_N, kl_N, 0.0)


def _measured(batch: MicroBatch, kl_N: Tensor, penalty_R: Tensor, shaping: ShapingConfig) -> Metrics:
    """`train/kl/reward`: what `next_kl_coef` takes for the mean KL."""
    metrics, counted_R = Metrics(), policy_tokens(batch) > 0
    rollouts = int(counted_R.sum())
    if shaping.kl_coef > 0:
        metrics.add("train/kl/reward", Mean(float(rollout_means(kl_N.double(), batch).sum()), rollouts))
    if shaping.overlong_buffer > 0:
        metrics.add("rollout/reward/overlong_penalty", Mean(float(penalty_R[counted_R].sum()), rollouts))
    if shaping.resample != "none":
        metrics.add(
            "rollout/resampled_fraction", Mean(float((batch.copies_R[counted_R] > 0).sum()), rollouts)
        )
    return metrics
