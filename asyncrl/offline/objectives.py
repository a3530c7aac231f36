"""The objectives of offline training. See `passes.Objective`.

    imitation     Σ −log π(token)                                over the mean of all target tokens
    preferences   h = β (Σ_chosen out − Σ_rejected out − reference − target)
                  −(1 − ε) log σ(h) − ε log σ(−h)                over the mean of all pairs

A pair is one rollout of two segments, the chosen answer and the rejected one: they are packed together, and neither
sees the other. Its `advantages_N` are what the two sums multiply each output with. The outputs are log-probs of an
answer's tokens, or a score at its end.

Axes:  N tokens · R rollouts, which are examples or pairs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from asyncrl.learner.algorithms.losses.aggregation import Counts
from asyncrl.learner.algorithms.reductions import policy_tokens, rollout_sums
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.telemetry.metrics import Mean, Metrics
from asyncrl.types import Version

REFERENCE, TARGET = "reference", "target"
"""Reward parts of a pair: the margin of the reference's log-probs, and the least margin that is wanted."""


@dataclass(frozen=True, slots=True)
class ImitationObjective:
    """Cross-entropy of the tokens under the mask."""

    def __call__(
        self, batch: MicroBatch, logp_N: Tensor, *entropy: Tensor, version: Version = 0
    ) -> tuple[Tensor, Metrics]:
        """(the sum, metrics)"""
        metrics = Metrics()
        for entropy_N in entropy:  # a prediction has none
            metrics.add("train/entropy", Mean(float(entropy_N.sum()), float(batch.loss_mask_N.sum())))
        return self.total(batch, logp_N), metrics

    def total(self, batch: MicroBatch, logp_N: Tensor, *entropy: Tensor, version: Version = 0) -> Tensor:
        """The sum alone."""
        return -torch.where(batch.loss_mask_N, logp_N, 0.0).sum()

    def counts(self, batch: MicroBatch) -> Counts:
        return Counts.of(batch)

    def divided(self, batch: MicroBatch) -> MicroBatch:
        return batch.by_segment()

    def denominator(self, counts: Counts) -> float:
        return float(max(1, counts.tokens))


@dataclass(frozen=True, slots=True)
class PreferenceObjective:
    """The probability of a preference between two answers, as a logistic function of the margin h between them.

    Reward models: Bradley and Terry 1952, with out a score and β = 1; the target is a margin m of the pair (Llama 2,
    arXiv:2307.09288, equation 2). DPO: Rafailov et al., arXiv:2305.18290, equation 7; label smoothing ε: Mitchell, A
    note on DPO with noisy preferences, 2023. SimPO: Meng et al., arXiv:2405.14734, equation 6, with means over tokens
    for sums, no reference, and the target γ/β. IPO: Azar et al., arXiv:2310.12036, equation 17: (h/β − 1/2β)².
    """

    beta: float = 1.0
    smoothing: float = 0.0
    loss: Literal["logistic", "ipo"] = "logistic"

    def __call__(
        self, batch: MicroBatch, out_N: Tensor, *others: Tensor, version: Version = 0
    ) -> tuple[Tensor, Metrics]:
        """(the sum, metrics): the share of pairs in the right order, and their mean margin."""
        counted_R, margin_R, metrics = policy_tokens(batch) > 0, self._margins(batch, out_N), Metrics()
        pairs = float(counted_R.sum())
        metrics.add("train/accuracy", Mean(float(((margin_R > 0) & counted_R).sum()), pairs))
        metrics.add("train/margin", Mean(self.beta * float(margin_R[counted_R].sum()), pairs))
        return self.total(batch, out_N), metrics

    def total(self, batch: MicroBatch, out_N: Tensor, *others: Tensor, version: Version = 0) -> Tensor:
        """The sum alone."""
        margin_R = self._margins(batch, out_N) - _part(batch, TARGET, out_N)
        if self.loss == "ipo":
            loss_R = (margin_R - 1 / (2 * self.beta)) ** 2
        else:
            h_R = self.beta * margin_R
            loss_R = -(1 - self.smoothing) * logsigmoid(h_R) - self.smoothing * logsigmoid(-h_R)
        return (loss_R * (policy_tokens(batch) > 0)).sum()

    def _margins(self, batch: MicroBatch, out_N: Tensor) -> Tensor:
        """[R], without the target."""
        return signed_sums(batch, out_N) - _part(batch, REFERENCE, out_N)

    def counts(self, batch: MicroBatch) -> Counts:
        return Counts.of(batch)

    def divided(self, batch: MicroBatch) -> MicroBatch:
        return batch

    def denominator(self, counts: Counts) -> float:
        return float(max(1, counts.rollouts))


def signed_sums(batch: MicroBatch, out_N: Tensor) -> Tensor:
    """[R]: Σ advantage · output over the mask, for a pair the chosen answer's less the rejected one's."""
    return rollout_sums(batch.advantages_N.to(out_N.dtype) * out_N, batch)


def with_signs(batch: MicroBatch, mean: bool = False) -> MicroBatch:
    """Pairs with advantages 1 in the chosen answer and −1 in the rejected one; `mean`: over the answer's tokens."""
    segment_N = torch.cumsum(batch.position_ids_N == 0, 0) - 1
    signs_N = 1.0 - 2.0 * (segment_N % 2)
    if mean:
        tokens_D = torch.bincount(segment_N, weights=batch.loss_mask_N.double())
        signs_N = signs_N / tokens_D.clamp(min=1).float()[segment_N]
    return batch.with_advantages(signs_N)


def _part(batch: MicroBatch, name: str, like: Tensor) -> Tensor:
    """[R]: 0 in a batch without it."""
    found_R = batch.parts_R.get(name)
    return like.new_zeros(batch.rollouts) if found_R is None else found_R.to(like.dtype)
