"""Terms of the objective beside the policy loss: a number per token, to be added to its loss before aggregation.

Axes:  N tokens · R rollouts
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.kl import kl
from asyncrl.learner.algorithms.losses.aggregation import AGGREGATIONS, Counts
from asyncrl.learner.algorithms.registry import Gather
from asyncrl.learner.algorithms.segments import column, over_ranks, succeeded
from asyncrl.learner.data.batch import MicroBatch


def entropy_term(entropy_N: Tensor, config: AlgorithmConfig) -> Tensor:
    """−bonus · H of the policy's distribution at each token."""
    return -config.entropy_bonus * entropy_N


def kl_term(logp_N: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """coef · KL(π‖reference), by the estimate `kl_loss.form`; 0 outside the mask, where it has no gradient.

    Raises TrainingError for a batch without the column `reference`.
    """
    # Before the KL, not after it: its slope at what stands outside the mask may be NaN, and 0 · NaN is not 0.
    inside_N = torch.where(batch.loss_mask_N, logp_N, 0.0)
    reference_N = torch.where(batch.loss_mask_N, column(batch, "reference"), 0.0)
    return config.kl_loss.coef * kl(inside_N, reference_N, config.kl_loss.form)


def lm_term(logp_N: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """coef · −log π, weighted by the column `lm`: the imitation of rollouts that succeeded.

    Raises TrainingError for a batch without that column, which `lm_weights` makes.
    """
    return -config.lm_coef * column(batch, "lm") * logp_N


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
