"""An advantage and a loss of one's own, named by `algorithm.own_advantage` and `algorithm.own_loss`."""

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.losses.policy_loss import PolicyTerms, TokenLoss, ratio
from asyncrl.learner.algorithms.registry import AlgorithmContext, advantage, loss
from asyncrl.learner.data.batch import MicroBatch


@advantage("median", source="an example", needs={"group"})
def median(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """R − median of the group: one lucky rollout does not move the baseline."""
    advantages_R = torch.empty_like(batch.rewards_R)
    for group in batch.group_R.unique():
        here_R = batch.group_R == group
        advantages_R[here_R] = batch.rewards_R[here_R] - batch.rewards_R[here_R].quantile(0.5)
    return advantages_R[batch.seq_N]


@loss("log_clip", source="an example")
def log_clip(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−A · clip(log ρ, −ε_lo, ε_hi): the gradient of REINFORCE, until the ratio has moved far enough."""
    log_rho_N = ratio(terms.logp_N, terms.proximal_N).log()
    bounded_N = log_rho_N.clamp(-config.clip_low, config.clip_high)
    return TokenLoss(-terms.advantages_N * bounded_N, (bounded_N != log_rho_N).detach())
