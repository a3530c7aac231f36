"""Advantages of whole rollouts: R, the reward of a rollout, set against the rewards of its group.

Every policy token of a rollout gets the same number. A group of one, and a group whose rewards are all equal, gets 0,
but for `asymre` and `off_policy_baseline`.

Axes:  G groups · R rollouts · n rollouts of one group · N tokens
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.reductions import (
    above_least,
    by_group,
    centred,
    centred_off_policy,
    group_sums,
    has_spread,
    leave_one_out,
    moved_since_behaviour,
    over_ranks,
    policy_tokens,
    rollout_sums,
    standardised,
    whiten,
    zeros,
)
from asyncrl.learner.algorithms.registry import AlgorithmContext, advantage
from asyncrl.learner.data.batch import MicroBatch


@advantage("grpo", source="DeepSeekMath, arXiv 2402.03300", needs={"group"})
def grpo(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """(R − mean of the group) / (unbiased standard deviation of the group + 1e-6).

    verl keeps R in a group of one.
    """
    return standardised(batch.rewards_R, batch.group_R)[batch.seq_N]


@advantage("dr_grpo", source="Dr. GRPO, arXiv 2503.20783", needs={"group"})
def dr_grpo(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """R − mean of the group, to be used with the aggregation 'seq-mean-token-sum-norm'.

    verl keeps R in a group of one.
    """
    return centred(batch.rewards_R, batch.group_R)[batch.seq_N]


@advantage("rloo", source="Back to Basics, arXiv 2402.14740", needs={"group"})
def rloo(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """R − mean of the others of the group = n / (n − 1) · (R − mean).

    verl keeps R in a group of one.
    """
    return leave_one_out(batch.rewards_R, batch.group_R)[batch.seq_N]


@advantage("opo", source="OPO, arXiv 2505.23585", needs={"group"})
def opo(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """R − Σ length · R / Σ length over the group, the baseline of least variance; length in policy tokens.

    Derived for rollouts of the current policy. verl keeps R in a group of one.
    """
    length_R, offset_R = policy_tokens(batch), above_least(batch.rewards_R, batch.group_R)
    lengths_R = group_sums(length_R, batch.group_R).clamp(min=1)
    baseline_R = group_sums(length_R * offset_R, batch.group_R) / lengths_R
    return (offset_R - baseline_R)[batch.seq_N]


@advantage("asymre", source="AsymRE, arXiv 2506.20520", needs={"group"})
def asymre(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """R − (mean of the group + δV), δV = `baseline_shift`.

    Below 0, δV makes old successes weigh more than old failures, of which a policy that has moved learns less. Groups
    whose rewards are all equal have the gradient of −δV, those in which all answers are wrong, too.
    """
    return (centred(batch.rewards_R, batch.group_R) - config.baseline_shift)[batch.seq_N]


@advantage(
    "off_policy_baseline",
    source="truncated importance sampling, Ionides 2008",
    needs={"group", "proximal"},
)
def off_policy_baseline(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """R − V, V = F + mean of min(w, 1) · (R − F) over the group.

    w = π/μ is the product over the policy tokens of the rollout, with the policy at the version's start. F,
    `baseline_floor`, is the reward assumed of answers that the group does not have: V is a lower estimate of the
    policy's own mean reward, where no reward is below F. For rollouts of the policy itself w is 1, and this is dr_grpo.
    Otherwise groups whose rewards are all equal have a gradient, too: right answers that have become less probable than
    under μ get an advantage above 0. In such a group, a mean of 1 − min(w, 1) below a tenth counts as none.
    """
    log_ratio_R = rollout_sums(moved_since_behaviour(batch), batch)
    return centred_off_policy(batch.rewards_R, log_ratio_R, config.baseline_floor, batch.group_R)[batch.seq_N]


@advantage("gpg", source="GPG, arXiv 2504.02546", needs={"group", "batch"})
def gpg(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """(R − mean of the group) · B / (B − M): B rollouts in the batch, M of them in groups whose rewards are all equal.

    The factor makes up for the groups that add nothing to the gradient. Rollouts without a policy token do not count.
    verl takes the rollouts whose reward is not 0 for B − M, which is something else.
    """
    counts_R = policy_tokens(batch) > 0
    every, spread = over_ranks(
        torch.stack([counts_R.sum(), (counts_R & has_spread(batch.rewards_R, batch.group_R)).sum()]),
        context.gather,
    )
    return (centred(batch.rewards_R, batch.group_R) * every / spread.clamp(min=1))[batch.seq_N]


@advantage("gdpo", source="GDPO, arXiv 2601.05242", needs={"group", "parts", "batch"})
def gdpo(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """Σ weight · grpo of each part of the reward, whitened over the policy tokens of the batch.

    Parts of small and of large spread have equal influence. The weights are those of `reward.weights`; verl has keys
    of its own for parts and weights.
    """
    total_R = zeros(batch.rollouts)
    for name, part_R in (batch.parts_R or {"reward": batch.rewards_R}).items():
        total_R += context.part_weights.get(name, 1.0) * standardised(part_R, batch.group_R)
    return whiten(total_R[batch.seq_N], batch, context.gather)


@advantage("reinforce_pp_baseline", source="REINFORCE++, arXiv 2501.03262", needs={"group", "batch"})
def reinforce_pp_baseline(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """R − mean of the group, whitened over the policy tokens of the batch.

    verl keeps R in a group of one.
    """
    return whiten(centred(batch.rewards_R, batch.group_R)[batch.seq_N], batch, context.gather)


@advantage("pass_at_k", source="arXiv 2503.19595; subsets: PKPO, 2505.15201", needs={"group"})
def pass_at_k(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """The rollout's contribution to the best of k: the sum over the k-subsets S with it of max(S) − max(S without it),
    over C(n, k), the number of all k-subsets of the group.

    So Σ A · ∇log π is an unbiased gradient of E[best of k]. With k = n only the best rollout gets anything,
    R_max − R_second, the only case in verl (which divides it by the group's standard deviation too, by default).
    """

    def gains(rewards_n: Tensor) -> Tensor:
        return best_of_k_gains(rewards_n, config.pass_k or len(rewards_n))

    return by_group(gains, batch.rewards_R, batch)[batch.seq_N]


@advantage("sppo", source="SPPO, arXiv 2405.00675", needs={"group"})
def sppo_target(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """η · (P̂ − ½), the target of a rollout's log-ratio; P̂ is how often it beats a rollout of its group, a tie counts ½.

    P̂ is the mean over all rollouts of the group, itself included, as in the paper; here rewards decide who wins. With
    `sppo_beta` = β it is η · (R − soft-mean_β(R)), soft-mean_β(R) = log(mean of exp(βR)) / β over the group (in verl's
    recipe over the whole batch, prompts mixed). To be used with the loss 'sppo'.
    """

    def edge(rewards_n: Tensor) -> Tensor:
        if config.sppo_beta is None:
            return win_rate(rewards_n) - 0.5
        return rewards_n - soft_mean(rewards_n, config.sppo_beta)

    return config.sppo_eta * by_group(edge, batch.rewards_R, batch)[batch.seq_N]


def best_of_k_gains(rewards_n: Tensor, k: int) -> Tensor:
    """[n]: for R_i, Σ_j (R_i − R_j) · C(j, k − 2) / C(n, k) over the smaller rewards; below R_j are j others.

    In a subset only the best adds something, max − second; C(j, k − 2) of them have i for their best and j for their
    second. k from 2; a group smaller than k is taken whole; 0 in a group of one.
    """
    n = len(rewards_n)
    k = min(k, n)
    if k < 2:
        return torch.zeros_like(rewards_n)
    weight_n = torch.tensor([math.comb(j, k - 2) / math.comb(n, k) for j in range(n)], dtype=rewards_n.dtype)
    sorted_n, order_n = rewards_n.sort()
    lead_nn = (sorted_n[:, None] - sorted_n).tril()
    gains_n = torch.empty_like(rewards_n)
    gains_n[order_n] = lead_nn @ weight_n
    return gains_n


def win_rate(rewards_n: Tensor) -> Tensor:
    """[n]: the share of the group that each reward is above, ties counting ½; ½ in a group of one."""
    return (0.5 * (rewards_n[:, None] - rewards_n).sign() + 0.5).mean(1)


def soft_mean(rewards_n: Tensor, beta: float) -> Tensor:
    """log(mean of exp(β · R)) / β; the plain mean at β = 0."""
    if beta == 0:
        return rewards_n.mean()
    return (torch.logsumexp(beta * rewards_n, 0) - math.log(len(rewards_n))) / beta
