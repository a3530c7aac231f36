"""From a loss per token to one number, always over the *global* batch of a version.

Every aggregation is Σ weight_N · loss_N over a global denominator. The weights need only the rollout at hand,
and the denominator is known when the last group has come: gradients accumulate as sums and are scaled once,
so micro-batching, streaming and data parallelism change nothing. A rollout that counts k times (`copies_R`) does so in
both.

Axes:  N tokens · R rollouts
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from asyncrl.learner.data.batch import MicroBatch


@dataclass(frozen=True, slots=True)
class Counts:
    """What a batch holds: policy tokens, and rollouts with at least one of them; copies counted."""

    tokens: int = 0
    rollouts: int = 0

    @staticmethod
    def of(batch: MicroBatch) -> Counts:
        tokens_R = tokens_per_rollout(batch.loss_mask_N, batch.seq_N, batch.rollouts)
        copies_R = batch.copies_R.double()
        return Counts(int((tokens_R * copies_R).sum()), int(((tokens_R > 0) * copies_R).sum()))

    @classmethod
    def total(cls, counts: Iterable[Self]) -> Counts:
        every = list(counts)
        return Counts(sum(c.tokens for c in every), sum(c.rollouts for c in every))


def tokens_per_rollout(loss_mask_N: Tensor, seq_N: Tensor, rollouts: int) -> Tensor:
    """[R] float64: policy tokens of each rollout."""
    zeros_R = torch.zeros(rollouts, dtype=torch.float64, device=seq_N.device)
    return zeros_R.index_add_(0, seq_N, loss_mask_N.double())


def _every_token(batch: MicroBatch, norm_tokens: int) -> Tensor:
    return batch.loss_mask_N * batch.copies_R.double()[batch.seq_N]


def _token_mean_in_rollout(batch: MicroBatch, norm_tokens: int) -> Tensor:
    per_rollout_R = tokens_per_rollout(batch.loss_mask_N, batch.seq_N, batch.rollouts)
    return _every_token(batch, norm_tokens) / per_rollout_R.clamp(min=1)[batch.seq_N]


def _over_constant(batch: MicroBatch, norm_tokens: int) -> Tensor:
    return _every_token(batch, norm_tokens) / norm_tokens


def _one(counts: Counts) -> int:
    return 1


def _tokens(counts: Counts) -> int:
    return counts.tokens


def _rollouts(counts: Counts) -> int:
    return counts.rollouts


@dataclass(frozen=True, slots=True)
class Aggregation:
    """weights(batch, norm_tokens) → weight_N float64, 0 outside the mask · denominator(counts of the global batch)."""

    weights: Callable[[MicroBatch, int], Tensor]
    denominator: Callable[[Counts], int]


AGGREGATIONS: Final[dict[str, Aggregation]] = {
    "token-mean": Aggregation(_every_token, _tokens),
    "token-sum": Aggregation(_every_token, _one),
    "seq-mean-token-sum": Aggregation(_every_token, _rollouts),
    "seq-mean-token-mean": Aggregation(_token_mean_in_rollout, _rollouts),
    "seq-mean-token-sum-norm": Aggregation(_over_constant, _rollouts),
}
