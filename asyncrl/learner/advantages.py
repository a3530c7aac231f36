"""Advantage estimators: pure functions from the rewards of whole groups to one advantage per policy token.

A new one is a function here under its literal, the literal in `AlgorithmConfig.advantage`, and a test with
numbers.

Axes:  G groups · R rollouts · N tokens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from asyncrl.config.schema import AlgorithmConfig
from asyncrl.learner.batch import MicroBatch

Estimator = Callable[[MicroBatch, AlgorithmConfig], Tensor]
"""A batch of whole groups → advantages_N, before `advantage_scale`; what it says where the mask is 0 is
ignored."""

STD_EPSILON = 1e-6


def advantages(batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """advantages_N of `algorithm.advantage`, scaled, 0 where the policy did not make the token."""
    return ESTIMATORS[config.advantage](batch, config) * config.advantage_scale * batch.loss_mask_N


def grpo(batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """(R − mean of the group) / (unbiased std of the group + 1e-6); 0 in a group of one (verl keeps R there).

    Source: DeepSeekMath, arXiv 2402.03300.
    """
    centred_R, count_R = _centred(batch)
    variance_R = _group_sums(centred_R**2, batch) / (count_R - 1).clamp(min=1)
    return (centred_R / (variance_R.sqrt() + STD_EPSILON))[batch.seq_N].float()


def dr_grpo(batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """R − mean of the group, to be used with the aggregation 'seq-mean-token-sum-norm'.

    Source: Dr. GRPO, arXiv 2503.20783.
    """
    centred_R, _ = _centred(batch)
    return centred_R[batch.seq_N].float()


def rloo(batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """R − mean of the others of the group = n / (n − 1) · (R − mean); 0 in a group of one.

    Source: Back to Basics, arXiv 2402.14740.
    """
    centred_R, count_R = _centred(batch)
    return (centred_R * count_R / (count_R - 1).clamp(min=1))[batch.seq_N].float()


ESTIMATORS: Final[dict[str, Estimator]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def _centred(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """(R − mean of its group, size of its group), both [R], in float64: rewards that differ in the sixth
    digit count as different. Equal rewards give exactly 0, which the mean alone would not promise."""
    rewards_R = batch.rewards_R.double()
    count_R = _group_sums(torch.ones_like(rewards_R), batch)
    base_R = _first_of_group(rewards_R, batch)
    offset_R = rewards_R - base_R
    return offset_R - _group_sums(offset_R, batch) / count_R, count_R


def _group_sums(values_R: Tensor, batch: MicroBatch) -> Tensor:
    """The sum over the group of each rollout, [R]."""
    sums_G = torch.zeros(int(batch.group_R.max()) + 1, dtype=values_R.dtype)
    return sums_G.index_add_(0, batch.group_R, values_R)[batch.group_R]


def _first_of_group(values_R: Tensor, batch: MicroBatch) -> Tensor:
    """The value of the first rollout of each rollout's group, [R]. A group's rollouts are adjacent."""
    starts_G = torch.cat([torch.tensor([True]), batch.group_R[1:] != batch.group_R[:-1]])
    return values_R[starts_G][batch.group_R]
