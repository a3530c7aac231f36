"""Reductions over the rollouts and groups of a flat batch, the recursion backwards in time, whitening.

Advantages are computed on the CPU in float64: rewards that differ in the sixth digit count as different, equal ones
give exactly 0. Tokens outside the loss mask (prompts, tool output) are skipped: their values never matter, and no
discount counts them.

Axes:  R rollouts · N tokens · P policy tokens · K values of any kind, each with the id of the group it belongs to
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor

from asyncrl.errors import TrainingError
from asyncrl.learner.algorithms.registry import Gather
from asyncrl.learner.data.batch import MicroBatch

STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8

ROUNDING = 1e-6
"""Rewards are float32, so R may differ from the sum of its parts by this share of their sizes. Such a rest is no
reward: it would make equal returns differ."""

NEGLIGIBLE = 0.1
"""In a group without spread, a mean of 1 − min(w, 1) below this gives advantages of exactly 0. A group of rollouts like
this costs no pass, and so small a difference may be rounding between engine and learner."""

SUCCESS: Final = 0.5
"""A rollout with a reward above this, before any shaping, has succeeded."""


class PackedRollouts(Protocol):
    """Tokens of several rollouts: `MicroBatch`, `PolicyTerms`, `Drift`."""

    @property
    def loss_mask_N(self) -> Tensor: ...

    @property
    def seq_N(self) -> Tensor: ...

    @property
    def rollouts(self) -> int: ...


def zeros(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float64)


# --- rollouts


def policy_tokens(packed: PackedRollouts) -> Tensor:
    """[R] int64: how many tokens of each rollout the policy made."""
    none_R = torch.zeros(packed.rollouts, dtype=torch.int64, device=packed.seq_N.device)
    return none_R.index_add_(0, packed.seq_N, packed.loss_mask_N.long())


def moved_since_behaviour(batch: MicroBatch) -> Tensor:
    """[N] float64: log π/μ, not clamped; π is the policy at the version's start, the column `proximal`."""
    return column(batch, "proximal").double() - batch.behaviour_N


def rollout_sums(values_N: Tensor, packed: PackedRollouts) -> Tensor:
    """[R]: the sum over the policy tokens of each rollout, in the dtype of the values and with their gradient."""
    kept_N = torch.where(packed.loss_mask_N, values_N, 0.0)
    return kept_N.new_zeros(packed.rollouts).index_add(0, packed.seq_N, kept_N)


def rollout_means(values_N: Tensor, packed: PackedRollouts) -> Tensor:
    """[R]: the mean over the policy tokens of each rollout, as `rollout_sums`; 0 for a rollout without any."""
    return rollout_sums(values_N, packed) / policy_tokens(packed).clamp(min=1)


def on_policy_tokens(values_P: Tensor, batch: MicroBatch) -> Tensor:
    """[N]: values of the policy tokens put where these are, 0 elsewhere."""
    return zeros(batch.tokens).masked_scatter_(batch.loss_mask_N, values_P.double())


def at_last_token(values_R: Tensor, batch: MicroBatch) -> Tensor:
    """[N]: each rollout's value on its last policy token, 0 elsewhere. Rollouts without one are left out."""
    owner_P = batch.seq_N[batch.loss_mask_N]
    last_P = torch.cat([owner_P[1:] != owner_P[:-1], owner_P.new_ones(1).bool()])[: len(owner_P)]
    return on_policy_tokens(torch.where(last_P, values_R.double()[owner_P], 0.0), batch)


def token_rewards(batch: MicroBatch) -> Tensor:
    """[N]: the rewards along the rollouts: the column `token_rewards` that `shaping.py` makes or, before there is one,
    the steps' rewards at their steps and the rest of R on the last policy token, where it is more than rounding."""
    if "token_rewards" in batch.columns:
        return batch.columns["token_rewards"].double()
    if "step_rewards" not in batch.columns:
        return at_last_token(batch.rewards_R, batch)
    steps_N = torch.where(batch.loss_mask_N, batch.columns["step_rewards"].double(), 0.0)
    rest_R = batch.rewards_R.double() - rollout_sums(steps_N, batch)
    rounding_R = ROUNDING * rollout_sums(steps_N.abs(), batch)
    return steps_N + at_last_token(torch.where(rest_R.abs() <= rounding_R, 0.0, rest_R), batch)


# --- groups


def place_in_group(batch: MicroBatch) -> Tensor:
    """[R] int64: the rollout's index in its group."""
    _, sizes_G = torch.unique_consecutive(batch.group_R, return_counts=True)
    return torch.cat([torch.arange(size) for size in sizes_G.tolist()])


def group_sizes(ids_K: Tensor) -> Tensor:
    """[K] int64: how many values have the same id."""
    return torch.bincount(ids_K)[ids_K]


def group_sums(values_K: Tensor, ids_K: Tensor) -> Tensor:
    """[K]: the sum over all values with the same id."""
    groups = len(torch.bincount(ids_K))
    return zeros(groups).index_add_(0, ids_K, values_K.double())[ids_K]


def above_least(values_K: Tensor, ids_K: Tensor) -> Tensor:
    """[K]: how far each value lies above the least of its group; exactly 0 where all are equal, unlike value − mean."""
    least = zeros(len(torch.bincount(ids_K)))
    least.scatter_reduce_(0, ids_K, values_K.double(), "amin", include_self=False)
    return values_K.double() - least[ids_K]


def has_spread(values_K: Tensor, ids_K: Tensor) -> Tensor:
    """[K] bool: whether the values of the group differ."""
    return group_sums(above_least(values_K, ids_K), ids_K) > 0


def centred(values_K: Tensor, ids_K: Tensor) -> Tensor:
    """[K]: value − mean of its group."""
    offset_K = above_least(values_K, ids_K)
    return offset_K - group_sums(offset_K, ids_K) / group_sizes(ids_K)


def standardised(values_K: Tensor, ids_K: Tensor) -> Tensor:
    """[K]: (value − mean of its group) / (unbiased standard deviation of the group + 1e-6); 0 in a group of one."""
    centred_K = centred(values_K, ids_K)
    variance_K = group_sums(centred_K**2, ids_K) / (group_sizes(ids_K) - 1).clamp(min=1)
    return centred_K / (variance_K.sqrt() + STD_EPSILON)


def centred_off_policy(values_K: Tensor, log_ratio_K: Tensor, floor: float, ids_K: Tensor) -> Tensor:
    """[K]: value − V, V = F + mean of min(w, 1) · (value − F) over its group; `centred` where w = 1.

    V is a lower estimate of the policy's own mean, where no value is below F. w = exp(log-ratio): π/μ of the tokens
    that earned the value. F, `floor`: the value assumed of what was not sampled. In a group without spread, a mean of
    1 − min(w, 1) below NEGLIGIBLE counts as none.
    """
    gain_K = values_K.double() - floor
    mean_K = group_sums(log_ratio_K.double().clamp(max=0).exp() * gain_K, ids_K) / group_sizes(ids_K)
    ahead_K = gain_K - mean_K
    even_K = ~has_spread(values_K, ids_K) & (ahead_K.abs() < NEGLIGIBLE * gain_K.abs())
    return torch.where(even_K, 0.0, ahead_K)


def leave_one_out(values_K: Tensor, ids_K: Tensor) -> Tensor:
    """[K]: value − mean of the others of its group = n / (n − 1) · (value − mean); 0 in a group of one."""
    size_K = group_sizes(ids_K)
    return centred(values_K, ids_K) * size_K / (size_K - 1).clamp(min=1)


def by_group(function: Callable[[Tensor], Tensor], values_R: Tensor, batch: MicroBatch) -> Tensor:
    """[R]: `function` of the values of each group, [n] → [n]. A group's rollouts are adjacent."""
    _, sizes_G = torch.unique_consecutive(batch.group_R, return_counts=True)
    return torch.cat([function(values_n) for values_n in values_R.double().split(sizes_G.tolist())])


# --- time


def places(owner_K: Tensor) -> Tensor:
    """[K] int64: how many values of the same owner come before this one; they are adjacent, owners' numbers rise."""
    counts_R = torch.bincount(owner_K)
    return torch.arange(len(owner_K)) - (counts_R.cumsum(0) - counts_R)[owner_K]


def reverse_sums(values_K: Tensor, decay_R: Tensor, owner_K: Tensor) -> Tensor:
    """[K]: x_k = v_k + decay · x_{k+1} within each owner, whose values are adjacent and in order of time.

    One loop over time for all owners at once. decay_R [R] of each owner, owner_K int64 its number, rising.
    """
    time_K = places(owner_K)
    longest = int(time_K.max()) + 1 if len(time_K) else 0
    sums_TR = torch.zeros(longest, len(decay_R), dtype=torch.float64)
    sums_TR[time_K, owner_K] = values_K.double()
    for t in range(len(sums_TR) - 2, -1, -1):
        sums_TR[t] += decay_R * sums_TR[t + 1]
    return sums_TR[time_K, owner_K]


def running_sums(values_K: Tensor, owner_K: Tensor) -> Tensor:
    """[K]: the sum of the values up to and with this one within each owner, whose values are adjacent."""
    sums_K = values_K.double().cumsum(0)
    first_K = torch.arange(len(owner_K)) - places(owner_K)
    return sums_K - (sums_K - values_K)[first_K]


def returns_to_go(rewards_N: Tensor, decay_R: Tensor | float, batch: MicroBatch) -> Tensor:
    """[N]: G_t = r_t + decay · G of the rollout's next policy token; 0 outside the mask."""
    mask_N = batch.loss_mask_N
    each_R = torch.as_tensor(decay_R, dtype=torch.float64).expand(batch.rollouts)
    return on_policy_tokens(reverse_sums(rewards_N[mask_N], each_R, batch.seq_N[mask_N]), batch)


def of_next_token(values_N: Tensor, batch: MicroBatch) -> Tensor:
    """[N]: the value at the rollout's next policy token, 0 at the last one and outside the mask."""
    values_P, owner_P = values_N[batch.loss_mask_N].double(), batch.seq_N[batch.loss_mask_N]
    next_P = torch.zeros_like(values_P)
    next_P[:-1] = torch.where(owner_P[1:] == owner_P[:-1], values_P[1:], 0.0)
    return on_policy_tokens(next_P, batch)


# --- all ranks


def over_ranks(sums_K: Tensor, gather: Gather) -> Tensor:
    """[K]: each of these sums, summed over all ranks."""
    return torch.stack(gather(sums_K.double())).sum(0)


def whiten(values_N: Tensor, batch: MicroBatch, gather: Gather) -> Tensor:
    """[N]: (x − mean) / sqrt(unbiased variance + 1e-8) over the policy tokens of all ranks; 0 outside the mask.

    Exactly 0 where all values are equal. `copies_R` is ignored: resampling draws from whitened rollouts.
    """
    values_P = values_N[batch.loss_mask_N].double()
    least_here = values_P.amin() if len(values_P) else values_P.new_tensor(torch.inf)
    offset_P = values_P - torch.cat(gather(least_here.reshape(1))).min()
    total, count = over_ranks(torch.stack([offset_P.sum(), torch.ones_like(offset_P).sum()]), gather)
    centred_P = offset_P - total / count
    squares = over_ranks((centred_P**2).sum().reshape(1), gather)
    variance = squares / (count - 1).clamp(min=1)
    return on_policy_tokens(centred_P * torch.rsqrt(variance + WHITEN_EPSILON), batch)


# --- required values of a batch


def column(batch: MicroBatch, name: str) -> Tensor:
    """[N], a column that the algorithm needs; zeros in a batch without policy tokens, which needs none. Raises
    TrainingError for a batch that lacks it."""
    if name in batch.columns:
        return batch.columns[name]
    of_steps = name in ("step", "anchor")
    _refuse_without(
        batch, f"column {name!r}", "steps from the reward function" if of_steps else "a model that makes it"
    )
    dtype = torch.int64 if of_steps else torch.float64
    return torch.zeros(batch.tokens, dtype=dtype, device=batch.loss_mask_N.device)


def reward_part(batch: MicroBatch, name: str) -> Tensor:
    """[R], one part of the reward, as `column`."""
    if name in batch.parts_R:
        return batch.parts_R[name]
    _refuse_without(batch, f"reward part {name!r}", "it from the reward function, for every rollout")
    return zeros(batch.rollouts)


def succeeded(batch: MicroBatch) -> Tensor:
    """[R] bool: rollouts whose reward before any shaping, the column `outcome`, is above SUCCESS."""
    outcome_N = column(batch, "outcome")
    outcome_R = outcome_N.new_zeros(batch.rollouts).scatter_reduce(
        0, batch.seq_N, outcome_N, "amax", include_self=False
    )  # equal along a rollout
    return outcome_R > SUCCESS


def _refuse_without(batch: MicroBatch, what: str, remedy: str) -> None:
    if batch.loss_mask_N.any():
        first, last = batch.ordinals_R.aminmax()
        raise TrainingError(
            f"the groups of tasks {int(first)} to {int(last)} lack the {what}: the algorithm needs {remedy}"
        )
