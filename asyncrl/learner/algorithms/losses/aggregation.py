"""From a loss per token to one number, always over the *global* batch of a version.

Every aggregation is Σ weight_N · loss_N over a global denominator. The weights depend on single rollouts, and the
denominator is known when the last group has arrived: gradients accumulate as sums and are scaled once, so
micro-batching, streaming and data parallelism change nothing. A rollout with
`copies_R` = k counts k times in the weights and in the denominator.

Axes:  N tokens · R rollouts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.reductions import over_ranks, policy_tokens, succeeded
from asyncrl.learner.algorithms.registry import Gather
from asyncrl.learner.data.batch import MicroBatch


@dataclass(frozen=True, slots=True)
class Counts:
    """Policy tokens of a batch, and rollouts with at least one of them; copies counted."""

    tokens: int = 0
    rollouts: int = 0

    @staticmethod
    def of(batch: MicroBatch) -> Counts:
        tokens_R = policy_tokens(batch)
        copies_R = batch.copies_R.double()
        return Counts(int((tokens_R * copies_R).sum()), int(((tokens_R > 0) * copies_R).sum()))

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.tokens + other.tokens, self.rollouts + other.rollouts)


def _every_token(batch: MicroBatch, norm_tokens: int) -> Tensor:
    return batch.loss_mask_N * batch.copies_R.double()[batch.seq_N]


def _token_mean_in_rollout(batch: MicroBatch, norm_tokens: int) -> Tensor:
    return _every_token(batch, norm_tokens) / policy_tokens(batch).clamp(min=1)[batch.seq_N]


def _over_constant(batch: MicroBatch, norm_tokens: int) -> Tensor:
    return _every_token(batch, norm_tokens) / norm_tokens


@dataclass(frozen=True, slots=True)
class Aggregation:
    """weights(batch, norm_tokens) → weight_N float64, 0 outside the mask · denominator(counts of the global batch)."""

    weights: Callable[[MicroBatch, int], Tensor]
    denominator: Callable[[Counts], int]


AGGREGATIONS: Final[dict[str, Aggregation]] = {
    "token-mean": Aggregation(_every_token, lambda counts: counts.tokens),
    "token-sum": Aggregation(_every_token, lambda counts: 1),
    "seq-mean-token-sum": Aggregation(_every_token, lambda counts: counts.rollouts),
    "seq-mean-token-mean": Aggregation(_token_mean_in_rollout, lambda counts: counts.rollouts),
    "seq-mean-token-sum-norm": Aggregation(_over_constant, lambda counts: counts.rollouts),
}


def lm_weights(batch: MicroBatch, config: AlgorithmConfig, norm_tokens: int, gather: Gather) -> Tensor:
    """[N]: scale · copies / share at the policy tokens of rollouts that have succeeded, else 0.

    share is what the aggregation multiplies the token with, and scale its denominator over Σ copies, of all ranks:
    for every aggregation the LM loss becomes Σ copies · −log π / Σ copies, the mean over these tokens. Source: the
    LM loss of positive examples in VAPO, arXiv 2504.05118. batch: this rank's part, with the column `outcome`; every
    rank calls. Raises TrainingError without that column.
    """
    rule, here = AGGREGATIONS[config.aggregation], Counts.of(batch)
    successful_N = batch.loss_mask_N & succeeded(batch)[batch.seq_N]
    copies_N = torch.where(successful_N, batch.copies_R[batch.seq_N], 0.0).double()
    sums = torch.tensor([here.tokens, here.rollouts, float(copies_N.sum())], dtype=torch.float64)
    tokens, rollouts, copies = over_ranks(sums, gather).tolist()
    scale = rule.denominator(Counts(int(tokens), int(rollouts))) / max(1.0, copies)
    share_N = rule.weights(batch, norm_tokens)
    return torch.where(copies_N > 0, scale * copies_N / share_N, 0.0).to(batch.behaviour_N.dtype)
