"""Advantages: from the rewards of whole groups to one number per policy token.

The estimators are pure functions, each under its literal of `AlgorithmConfig.advantage`:

    group_advantages.py   one number per rollout, from its group
    return_advantages.py  one number per token, from what comes after it
    step_advantages.py    one number per step of an agent, from the steps of its group that began alike

Axes:  R rollouts · N tokens
"""

from __future__ import annotations

import dataclasses
from typing import Final, NoReturn

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.errors import TrainingError
from asyncrl.learner.algorithms.registry import AlgorithmContext, advantage_of
from asyncrl.learner.data.batch import MicroBatch

ONE_RANK: Final = AlgorithmContext()


def advantages(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext = ONE_RANK) -> Tensor:
    """advantages_N float32 of `algorithm.advantage` or `own_advantage`, scaled, 0 outside the mask.

    Raises TrainingError for a batch that lacks something that the estimator needs, and for an estimator that computes
    statistics over all ranks without declaring the need 'batch'.
    """
    entry = advantage_of(config)
    if "batch" not in entry.needs:  # it gets the groups of one rank as they arrive
        context = dataclasses.replace(context, gather=_not_declared)
    raw_N = entry.function(batch, config, context) * segment_shares(batch, config.segment_credit)
    return torch.where(batch.loss_mask_N, raw_N * config.advantage_scale, 0.0).float()


def segment_shares(batch: MicroBatch, rule: str) -> Tensor:
    """[N] float64: the share of its advantage that `algorithm.segment_credit` leaves to a token.

    each: all of it · split: one part in as many as the rollout has segments · last: all of it in the segment that ended
    the rollout, nothing in the others
    """
    if rule == "each":
        return torch.ones(batch.tokens, dtype=torch.float64)
    rollout_D = batch.seq_N[batch.position_ids_N == 0]
    share_D = torch.ones(len(rollout_D), dtype=torch.float64)
    if rule == "split":
        share_D /= rollout_D.bincount()[rollout_D]
    elif rule == "last":
        share_D[:-1] = (rollout_D.diff() != 0).double()
    return share_D[(batch.position_ids_N == 0).cumsum(0) - 1]


def _not_declared(mine: Tensor) -> NoReturn:
    raise TrainingError("this advantage calls context.gather: declare needs={'batch'} where it is noted")
