"""Metrics of the batch that a version is trained on; they add up over claims and ranks.

    batch_metrics                       all its rollouts: rewards, lengths, age
    advantage_metrics, value_metrics    their advantages and values
    token_metrics, age_metrics          the tokens that had a forward pass

Axes:  N tokens · R rollouts · G groups · P policy tokens (those under the mask)
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from asyncrl.learner.algorithms.losses.policy_loss import kl, log_ratio
from asyncrl.learner.algorithms.reductions import column
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.packing import moving_rollouts
from asyncrl.telemetry.metrics import EffectiveShare, ExplainedVariance, Max, Mean, Metrics, Sum
from asyncrl.types import Version

PART: Final = "reward/part/"


def batch_metrics(batch: MicroBatch, version: Version) -> Metrics:
    """Metrics of all rollouts that a version is trained on, also those without a forward pass. Reward parts are sums,
    for `version_values`: not every claim has all parts."""
    metrics, tokens = Metrics(), int(batch.loss_mask_N.sum())
    metrics.add("reward/mean", Mean(float(batch.rewards_R.sum()), batch.rollouts))
    for name, part_R in batch.parts_R.items():
        metrics.add(f"{PART}{name}", Sum(float(part_R.sum())))
    metrics.add("groups", Sum(batch.groups))
    metrics.add("rollouts", Sum(batch.rollouts))
    metrics.add("tokens", Sum(tokens))
    metrics.add("tokens_with_prompts", Sum(batch.tokens))
    metrics.add("length/mean", Mean(tokens, batch.rollouts))
    metrics.add("segments/mean", Mean(batch.segments, batch.rollouts))
    metrics.merge([staleness_metrics(batch, version)])
    return metrics


def version_values(metrics: Metrics) -> dict[str, float]:
    """The values of a whole version's metrics; reward parts are means over all of its rollouts."""
    values = metrics.values()
    return {
        name: value / values["rollouts"] if name.startswith(PART) else value for name, value in values.items()
    }


def staleness_metrics(batch: MicroBatch, version: Version) -> Metrics:
    """Ages in versions, at the training of `version`.

    staleness/mean and staleness/max are over groups, each by its oldest token. The mean is the sum of
    staleness/in_flight, from the oldest token to the newest (policies that arrived while the group was generated), and
    staleness/in_queue, from the newest token to now. staleness/token is the mean age over tokens.
    """
    metrics, groups = Metrics(), batch.groups
    age_P = version - batch.versions_N[batch.loss_mask_N]
    group_P = batch.group_R[batch.seq_N[batch.loss_mask_N]]
    nothing_G = torch.full((groups,), -1, dtype=age_P.dtype)
    oldest_G = nothing_G.scatter_reduce(0, group_P, age_P, "amax", include_self=False)
    newest_G = nothing_G.scatter_reduce(0, group_P, age_P, "amin", include_self=False)
    nonempty_G = torch.bincount(group_P, minlength=groups) > 0
    count = int(nonempty_G.sum())
    metrics.add("staleness/mean", Mean(float(oldest_G[nonempty_G].sum()), count))
    metrics.add("staleness/max", Max(float(max(oldest_G[nonempty_G].tolist(), default=0))))
    metrics.add("staleness/in_flight", Mean(float((oldest_G - newest_G)[nonempty_G].sum()), count))
    metrics.add("staleness/in_queue", Mean(float(newest_G[nonempty_G].sum()), count))
    metrics.add("staleness/token", Mean(float(age_P.sum()), len(age_P)))
    return metrics


def token_metrics(
    batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor, clipped_N: Tensor, weight_N: Tensor
) -> Metrics:
    """Distances of π, with the log-probs logp_N, from μ, which made the tokens. All inputs [N], no gradient.

    π is the policy at the version's start where its log-probs are known (the column `proximal`), else the policy as it
    is; until the version's first optimizer step both are the same.

    ratio/* of w = π/μ; ratio/ess is the effective sample size as a share of the tokens. The divergences are estimates
    of KL(μ‖π) from μ's own samples: kl/k1 = mean log μ/π; kl/k3 = mean (π/μ − 1 − log π/μ), never negative
    (http://joschu.net/blog/kl-approx.html). In all but k1 log π/μ is clamped to ±20. kl/reference: k3 of
    KL(π‖reference), where there is one. share/clipped: tokens whose loss is clipped; share/cut_out: tokens of
    weight 0.
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
    metrics.add("ratio/mean", Mean(total, count))
    metrics.add("ratio/max", Max(float(ratio_P.max()) if count else 0.0))
    metrics.add("ratio/ess", EffectiveShare(total, squares, count))
    names = ("kl/k1", "kl/k3", "entropy", "share/clipped", "share/cut_out")
    for name, value in zip(names, sums, strict=True):
        metrics.add(name, Mean(value, count))
    if "reference" in batch.columns:
        apart_P = kl(logp_N, batch.columns["reference"], "k3")[mask_N]
        metrics.add("kl/reference", Mean(float(apart_P.sum()), count))
    return metrics


def age_metrics(batch: MicroBatch, logp_N: Tensor, clipped_N: Tensor, version: Version) -> Metrics:
    """Metrics by the tokens' age in versions, at the training of `version`. All inputs [N], no gradient.

    For each bin of ages A (0, 1, 2-3, 4-7 and so on): age/A/log_ratio, mean log π/μ, and age/A/clipped, the share of
    tokens whose loss is clipped.
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
            metrics.add(f"age/{_ages(which)}/log_ratio", Mean(moved, count))
            metrics.add(f"age/{_ages(which)}/clipped", Mean(clipped, count))
    return metrics


def advantage_metrics(batch: MicroBatch) -> Metrics:
    """share/flat_groups: groups in which no token has an advantage."""
    metrics, moving = Metrics(), len({int(batch.group_R[r]) for r in moving_rollouts(batch)})
    metrics.add("share/flat_groups", Mean(batch.groups - moving, batch.groups))
    return metrics


def value_metrics(batch: MicroBatch) -> Metrics:
    """Fit of each critic's values to the returns that it is about to be trained on."""
    metrics = Metrics()
    for name, prefix in (("critic", ""), ("cost_critic", "cost_")):
        if f"{prefix}returns" not in batch.columns:
            continue
        returns_P = batch.columns[f"{prefix}returns"][batch.loss_mask_N].double()
        errors_P = returns_P - column(batch, f"{prefix}values")[batch.loss_mask_N].double()
        sums = [returns_P.sum(), returns_P.square().sum(), errors_P.sum(), errors_P.square().sum()]
        returns, squares, errors, error_squares = torch.stack(sums).tolist()
        count = len(errors_P)
        metrics.add(f"{name}/returns", Mean(returns, count))
        metrics.add(f"{name}/values", Mean(returns - errors, count))
        explained = ExplainedVariance(returns, squares, errors, error_squares, count)
        metrics.add(f"{name}/explained_variance", explained)
    return metrics


def _ages(which: int) -> str:
    """The ages of a bin.

    >>> [_ages(which) for which in range(4)]
    ['0', '1', '2-3', '4-7']
    """
    return str(which) if which < 2 else f"{1 << which - 1}-{(1 << which) - 1}"
