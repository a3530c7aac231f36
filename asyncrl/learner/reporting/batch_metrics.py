"""Metrics of the batch that a version is trained on; they add up over claims and ranks.

    end_metrics                         how its rollouts ended
    batch_metrics                       all of them: rewards, lengths, age
    advantage_metrics, value_metrics    their advantages and values
    token_metrics, age_metrics          the tokens that had a forward pass

Axes:  N tokens · R rollouts · G groups · P policy tokens (those under the mask)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from asyncrl.learner.algorithms.losses.policy_loss import kl, log_ratio
from asyncrl.learner.algorithms.reductions import column, policy_tokens
from asyncrl.learner.algorithms.roles import ROLES
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.packing import moving_rollouts
from asyncrl.telemetry.metrics import (
    Deviation,
    EffectiveShare,
    ExplainedVariance,
    Max,
    Mean,
    Metrics,
    Min,
    Sum,
)
from asyncrl.types import Group, Version

PART: Final = "rollout/reward/part/"


def end_metrics(groups: Sequence[Group]) -> Metrics:
    """rollout/length/truncated: rollouts that ended at a limit of tokens or turns, not by themselves."""
    metrics, ends = Metrics(), [finish for group in groups for finish in group.finish]
    metrics.add("rollout/length/truncated", Mean(ends.count("length"), len(ends)))
    return metrics


def batch_metrics(batch: MicroBatch, version: Version) -> Metrics:
    """Metrics of all rollouts that a version is trained on, also those without a forward pass. Reward parts are sums,
    for `version_values`: not every claim has all parts."""
    metrics, tokens = Metrics(), int(batch.loss_mask_N.sum())
    rewards_R, length_R = batch.rewards_R.double(), policy_tokens(batch)
    total, squares = float(rewards_R.sum()), float(rewards_R.square().sum())
    metrics.add("rollout/reward/mean", Mean(total, batch.rollouts))
    metrics.add("rollout/reward/std", Deviation(total, squares, batch.rollouts))
    metrics.add("rollout/reward/min", Min(float(rewards_R.min())))
    metrics.add("rollout/reward/max", Max(float(rewards_R.max())))
    for name, part_R in batch.parts_R.items():
        metrics.add(f"{PART}{name}", Sum(float(part_R.sum())))
    metrics.add("train/groups", Sum(batch.groups))
    metrics.add("train/rollouts", Sum(batch.rollouts))
    metrics.add("train/tokens", Sum(tokens))
    metrics.add("train/tokens_with_prompts", Sum(batch.tokens))
    metrics.add("rollout/length/mean", Mean(tokens, batch.rollouts))
    metrics.add("rollout/length/min", Min(float(length_R.min())))
    metrics.add("rollout/length/max", Max(float(length_R.max())))
    metrics.add("rollout/segments/mean", Mean(batch.segments, batch.rollouts))
    metrics.merge([staleness_metrics(batch, version)])
    return metrics


def version_values(metrics: Metrics) -> dict[str, float]:
    """The values of a whole version's metrics; reward parts are means over all of its rollouts."""
    values = metrics.values()
    return {
        name: value / values["train/rollouts"] if name.startswith(PART) else value
        for name, value in values.items()
    }


def staleness_metrics(batch: MicroBatch, version: Version) -> Metrics:
    """Ages in versions, at the training of `version`.

    train/staleness/mean and train/staleness/max are over groups, each by its oldest token. The mean is the sum of
    train/staleness/in_flight, from the oldest token to the newest (policies that arrived while the group was
    generated), and train/staleness/in_queue, from the newest token to now. train/staleness/token is the mean age over
    tokens. rollout/length/fresh and rollout/length/old are lengths of rollouts in groups of an age up to 1, and above.
    """
    metrics, groups = Metrics(), batch.groups
    age_P = version - batch.versions_N[batch.loss_mask_N]
    group_P = batch.group_R[batch.seq_N[batch.loss_mask_N]]
    nothing_G = torch.full((groups,), -1, dtype=age_P.dtype)
    oldest_G = nothing_G.scatter_reduce(0, group_P, age_P, "amax", include_self=False)
    newest_G = nothing_G.scatter_reduce(0, group_P, age_P, "amin", include_self=False)
    nonempty_G = torch.bincount(group_P, minlength=groups) > 0
    count = int(nonempty_G.sum())
    metrics.add("train/staleness/mean", Mean(float(oldest_G[nonempty_G].sum()), count))
    metrics.add("train/staleness/max", Max(float(max(oldest_G[nonempty_G].tolist(), default=0))))
    metrics.add("train/staleness/in_flight", Mean(float((oldest_G - newest_G)[nonempty_G].sum()), count))
    metrics.add("train/staleness/in_queue", Mean(float(newest_G[nonempty_G].sum()), count))
    metrics.add("train/staleness/token", Mean(float(age_P.sum()), len(age_P)))
    tokens_G = torch.bincount(group_P, minlength=groups)
    rollouts_G = torch.bincount(batch.group_R, minlength=groups)
    for name, chosen_G in (("fresh", nonempty_G & (oldest_G <= 1)), ("old", nonempty_G & (oldest_G > 1))):
        if chosen_G.any():
            length = Mean(float(tokens_G[chosen_G].sum()), int(rollouts_G[chosen_G].sum()))
            metrics.add(f"rollout/length/{name}", length)
    return metrics


def token_metrics(
    batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor, clipped_N: Tensor, weight_N: Tensor
) -> Metrics:
    """Distances of π, with the log-probs logp_N, from μ, which made the tokens. All inputs [N], no gradient.

    π is the policy at the version's start where its log-probs are known (the column `proximal`), else the policy as it
    is; until the version's first optimizer step both are the same.

    train/ratio/* of w = π/μ; train/effective_sample_size as a share of the tokens. Two estimates of KL(μ‖π) from μ's
    own samples: train/approx_kl = mean (π/μ − 1 − log π/μ), which is called k3 and never negative, and
    train/approx_kl_k1 = mean log μ/π (http://joschu.net/blog/kl-approx.html). In all but k1 log π/μ is clamped to ±20.
    train/kl/reference: k3 of KL(π‖reference), where there is one. train/clip_fraction: tokens whose loss is clipped;
    train/zero_weight_fraction: tokens of weight 0.
    """
    mask_N = batch.loss_mask_N
    moved_P = (logp_N - batch.behaviour_N)[mask_N]
    log_ratio_P = log_ratio(logp_N, batch.behaviour_N)[mask_N]
    ratio_P = log_ratio_P.exp()
    count = len(ratio_P)
    total, squares, *sums = torch.stack(
        [
            ratio_P.sum(),
            ratio_P.square().sum(),
            -moved_P.sum(),
            (torch.expm1(log_ratio_P) - log_ratio_P).sum(),
            entropy_N[mask_N].sum(),
            clipped_N[mask_N].sum(),
            (weight_N[mask_N] == 0).sum(),
        ]
    ).tolist()
    metrics = Metrics()
    metrics.add("train/ratio/mean", Mean(total, count))
    metrics.add("train/ratio/max", Max(float(ratio_P.max()) if count else 0.0))
    metrics.add("train/effective_sample_size", EffectiveShare(total, squares, count))
    names = (
        "train/approx_kl_k1",
        "train/approx_kl",
        "train/entropy",
        "train/clip_fraction",
        "train/zero_weight_fraction",
    )
    for name, value in zip(names, sums, strict=True):
        metrics.add(name, Mean(value, count))
    if "reference" in batch.columns:
        apart_P = kl(logp_N, batch.columns["reference"], "k3")[mask_N]
        metrics.add("train/kl/reference", Mean(float(apart_P.sum()), count))
    return metrics


def teacher_metrics(batch: MicroBatch, outcome_NO: Tensor) -> Metrics:
    """train/teacher/mass and train/teacher/policy_mass: what the teacher's most likely tokens have of its and of the
    policy's probability. outcome_NO: the policy's log-probs of the outcomes, without gradient."""
    metrics, mask_N = Metrics(), batch.loss_mask_N
    if not mask_N.any():  # padding, which may have no outcomes
        return metrics
    for name, logp_NO in (("mass", column(batch, "teacher_likeliest")), ("policy_mass", outcome_NO)):
        mass_P = 1 - logp_NO[mask_N, -1].exp()
        metrics.add(f"train/teacher/{name}", Mean(float(mass_P.sum()), len(mass_P)))
    return metrics


def age_metrics(batch: MicroBatch, logp_N: Tensor, clipped_N: Tensor, version: Version) -> Metrics:
    """Metrics by the tokens' age in versions, at the training of `version`. All inputs [N], no gradient.

    For each bin of ages A (0, 1, 2-3, 4-7 and so on): train/age/A/log_ratio, mean log π/μ, and
    train/age/A/clip_fraction, the share of tokens whose loss is clipped.
    """
    mask_N = batch.loss_mask_N
    age_P = (version - batch.versions_N[mask_N]).clamp(min=0).double()
    bin_P = torch.frexp(age_P).exponent.long()  # 0 → 0, 1 → 1, 2 and 3 → 2, 4 to 7 → 3
    sums = [
        torch.bincount(bin_P, weights=values_N[mask_N].double())
        for values_N in (torch.ones_like(logp_N), logp_N - batch.behaviour_N, clipped_N)
    ]
    metrics = Metrics()
    for which, (count, moved, clipped) in enumerate(torch.stack(sums, 1).tolist()):
        if count:
            metrics.add(f"train/age/{_ages(which)}/log_ratio", Mean(moved, count))
            metrics.add(f"train/age/{_ages(which)}/clip_fraction", Mean(clipped, count))
    return metrics


def ready_metrics(batch: MicroBatch) -> Metrics:
    """Metrics of a batch that is ready to train on."""
    return Metrics.of([advantage_metrics(batch), value_metrics(batch)])


def advantage_metrics(batch: MicroBatch) -> Metrics:
    """rollout/flat_group_fraction: groups in which no token has an advantage."""
    metrics, moving = Metrics(), len({*batch.group_R[moving_rollouts(batch)].tolist()})
    metrics.add("rollout/flat_group_fraction", Mean(batch.groups - moving, batch.groups))
    return metrics


def value_metrics(batch: MicroBatch) -> Metrics:
    """Fit of each critic's values to the returns that it is about to be trained on."""
    metrics = Metrics()
    for name, role in ROLES.items():
        if role.returns not in batch.columns:
            continue
        returns_P = batch.columns[role.returns][batch.loss_mask_N].double()
        errors_P = returns_P - column(batch, role.outputs)[batch.loss_mask_N].double()
        sums = [returns_P.sum(), returns_P.square().sum(), errors_P.sum(), errors_P.square().sum()]
        returns, squares, errors, error_squares = torch.stack(sums).tolist()
        count = len(errors_P)
        metrics.add(f"train/{name}/returns", Mean(returns, count))
        metrics.add(f"train/{name}/values", Mean(returns - errors, count))
        explained = ExplainedVariance(returns, squares, errors, error_squares, count)
        metrics.add(f"train/{name}/explained_variance", explained)
    return metrics


def _ages(which: int) -> str:
    """The ages of a bin.

    >>> [_ages(which) for which in range(4)]
    ['0', '1', '2-3', '4-7']
    """
    return str(which) if which < 2 else f"{1 << which - 1}-{(1 << which) - 1}"
