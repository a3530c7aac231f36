"""Losses that keep the entropy up: they clip or penalise the few tokens that would lower it most.

Entropy falls by the covariance of log-prob and advantage. `select_covariance` selects tokens by their part in it,
before the loss and over the batch of all ranks; the loss reads them from `PolicyTerms.selected_N`.

Axes:  N tokens · P policy tokens · K candidates of all ranks
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.counter_rng import uniform
from asyncrl.learner.algorithms.losses.policy_loss import PolicyTerms, TokenLoss, ratio
from asyncrl.learner.algorithms.losses.ratio_losses import ppo
from asyncrl.learner.algorithms.reductions import over_ranks, place_in_group
from asyncrl.learner.algorithms.registry import AlgorithmContext, Gather, loss
from asyncrl.learner.data.batch import MicroBatch, numbered

SELECTING: Final = 2
"""Part of the counter of this module's draws, which keeps them distinct from others."""

SOURCE: Final = "The Entropy Mechanism of RL, arXiv 2505.22617"


@loss("clip_cov", source=SOURCE, needs={"batch", "proximal"})
def clip_cov(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """ppo, and 0 for a random `cov_share` of the batch's tokens, out of those whose covariance is inside `cov_range`.

    The covariance of a token is (log π − mean) · (A − mean), means over the batch; what ppo clips is not eligible. verl
    selects in each micro-batch by itself.
    """
    loss_N, clipped_N = ppo(terms, config)
    selected_N = _selected(terms)
    return TokenLoss(torch.where(selected_N, 0.0, loss_N), clipped_N | selected_N)


@loss("kl_cov", source=SOURCE, needs={"batch", "proximal"})
def kl_cov(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−A · ρ, and + `cov_kl_coef` · |log ρ| for the `cov_share` of the batch's tokens with the largest covariance.

    The covariance of a token is (log π − mean) · (A − mean), means over the batch. Nothing is clipped. verl selects in
    each micro-batch by itself.
    """
    rho_N = ratio(terms.logp_N, terms.proximal_N)
    selected_N = _selected(terms)
    penalty_N = config.cov_kl_coef * (terms.logp_N - terms.proximal_N).abs()
    return TokenLoss(-terms.advantages_N * rho_N + torch.where(selected_N, penalty_N, 0.0), selected_N)


def select_covariance(
    batch: MicroBatch, logp_N: Tensor, proximal_N: Tensor, config: AlgorithmConfig, context: AlgorithmContext
) -> Tensor:
    """[N] bool: the tokens that `algorithm.loss` (clip_cov or kl_cov) treats differently. Every rank must call.

    batch: this rank's part, whole groups · logp_N log π, proximal_N log π_p, without gradients, all on the CPU.
    max(1, share · policy tokens of all ranks) tokens, or all eligible ones. Random draws are a function of (seed,
    ordinal, place in the group, place in the rollout), and so independent of batching.
    """
    mask_N = batch.loss_mask_N
    logp_P, advantages_P = logp_N[mask_N].double(), batch.advantages_N[mask_N].double()
    tokens, logp, advantages = over_ranks(
        torch.stack([mask_N.sum().double(), logp_P.sum(), advantages_P.sum()]), context.gather
    )
    covariance_P = (logp_P - logp / tokens) * (advantages_P - advantages / tokens)
    if config.loss == "clip_cov":
        low, high = config.cov_range
        clipped_P = ppo(PolicyTerms.of(batch, logp_N, proximal_N), config).clipped_N[mask_N]
        eligible_P = (low < covariance_P) & (covariance_P < high) & ~clipped_P
        key_P = torch.zeros_like(covariance_P)  # the same for all: the draw decides
    else:
        eligible_P = torch.ones_like(covariance_P, dtype=torch.bool)
        key_P = -covariance_P
    count = max(1, int(config.cov_share * float(tokens)))
    chosen_P = _smallest(key_P, _draws(batch, context)[mask_N], eligible_P, count, context.gather)
    return torch.zeros_like(mask_N).masked_scatter_(mask_N, chosen_P)


def _selected(terms: PolicyTerms) -> Tensor:
    if terms.selected_N is None:
        raise ValueError("clip_cov and kl_cov need what select_covariance picks from the whole batch")
    return terms.selected_N


def _draws(batch: MicroBatch, context: AlgorithmContext) -> Tensor:
    """[N] float64 inside (0, 1), a token's own."""
    ordinal_N, rollout_N = batch.ordinals_R[batch.seq_N], place_in_group(batch)[batch.seq_N]
    _, token_N = numbered(np.asarray(batch.lengths_R))
    return torch.from_numpy(
        uniform(*context.seed, SELECTING, ordinal_N.numpy(), rollout_N.numpy(), token_N.numpy())
    )


def _smallest(key_P: Tensor, draw_P: Tensor, eligible_P: Tensor, count: int, gather: Gather) -> Tensor:
    """[P] bool: this rank's share of the `count` eligible tokens with the smallest (key, draw) over all ranks."""
    # No rank can have more than `count` of them: the others need not travel.
    mine_K2 = _sorted(torch.stack([key_P, draw_P], 1)[eligible_P])[:count]
    smallest_K2 = _sorted(torch.cat(gather(mine_K2)))[:count]
    if not len(smallest_K2):
        return torch.zeros_like(eligible_P)
    key, draw = smallest_K2[-1]
    return eligible_P & ((key_P < key) | ((key_P == key) & (draw_P <= draw)))


def _sorted(pairs_K2: Tensor) -> Tensor:
    """By the first number and, where that is equal, by the second."""
    return pairs_K2[np.lexsort((pairs_K2[:, 1].numpy(), pairs_K2[:, 0].numpy()))]
