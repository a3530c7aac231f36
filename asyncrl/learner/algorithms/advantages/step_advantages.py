"""Advantages of an agent's steps: each step against those of its group that began in the same state.

A step is what the policy made between two states (the columns `step` and `anchor`, see `types.COLUMNS`). Its return is
Σ_{u≥s} γ^{u−s} · (sum of the rewards in step u): discounted per step, not per token.

Axes:  S steps of all rollouts, a rollout's steps adjacent and in order · R rollouts · P policy tokens · N tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.reductions import (
    centred_off_policy,
    column,
    has_spread,
    moved_since_behaviour,
    on_policy_tokens,
    reverse_sums,
    rollout_sums,
    standardised,
    token_rewards,
    zeros,
)
from asyncrl.learner.algorithms.registry import AlgorithmContext, advantage
from asyncrl.learner.data.batch import MicroBatch


@advantage("gigpo", source="GiGPO, arXiv 2505.10978", needs={"group", "steps"})
def gigpo(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """grpo of R over the rollouts + ω · grpo of the step returns over the steps that began in the same state.

    A step that is alone in its state gets the first term only.
    """
    steps = BatchSteps.of(batch, config.gamma)
    episode_R = standardised(batch.rewards_R, batch.group_R)
    step_S = standardised(steps.returns_S, steps.state_S)
    return episode_R[batch.seq_N] + config.step_weight * on_policy_tokens(step_S[steps.step_P], batch)


@advantage("hgpo", source="HGPO, arXiv 2602.22817", needs={"group", "steps"})
def hgpo(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """Σ_k w_k · grpo of the step returns over the steps that share their state and the k before it, w_k ∝ (k + 1)^α.

    k runs from 0, gigpo's groups, to `hgpo_history`; a step with fewer than k before it has no level k. A level in
    which a step is alone, or all returns are equal, is left out: its weight goes to the others. The episode has no
    advantage of its own, as in the paper. The authors' code divides by the biased standard deviation, has
    w_k ∝ (k + 2)^α, and leaves a level out for each single step whose advantage there is exactly 0, not for a group
    whose returns are all equal.
    """
    steps = BatchSteps.of(batch, config.gamma)
    total_S, weights_S = torch.zeros_like(steps.returns_S), torch.zeros_like(steps.returns_S)
    context_S = steps.state_S
    for k in range(config.hgpo_history + 1):
        if k > 0:
            context_S = steps.one_state_more(context_S)
        weight_S = (k + 1) ** config.hgpo_alpha * has_spread(steps.returns_S, context_S)
        total_S += weight_S * standardised(steps.returns_S, context_S)
        weights_S += weight_S
    step_S = torch.where(weights_S > 0, total_S / weights_S, 0.0)
    return on_policy_tokens(step_S[steps.step_P], batch)


@advantage(
    "off_policy_step_baseline",
    source="states: GiGPO, arXiv 2505.10978; truncated importance sampling, Ionides 2008",
    needs={"group", "steps", "proximal"},
)
def off_policy_step_baseline(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """G − V, V = F + mean of min(w, 1) · (G − F) over the steps of the group that began in the same state.

    G is the return of a step. w = π/μ is the product over the rollout's policy tokens from that step on, with the
    policy at the version's start. F, `baseline_floor`, is the return assumed of what the group does not have: V is a
    lower estimate of what the policy itself would earn from that state, where no return is below F. For rollouts of
    the policy itself w is 1, and V is the mean. A step whose state no other rollout of the group came to gets
    `off_policy_baseline`: its rollout is set against those of the group. Where all returns of a state are equal, a mean
    of 1 − min(w, 1) below a tenth counts as none. Nothing is divided by a standard deviation.
    """
    steps = BatchSteps.of(batch, config.gamma)
    floor = config.baseline_floor
    moved_N = moved_since_behaviour(batch)
    moved_S = zeros(len(steps.returns_S)).index_add_(0, steps.step_P, moved_N[batch.loss_mask_N])
    to_the_end_S = reverse_sums(moved_S, torch.ones(batch.rollouts, dtype=torch.float64), steps.rollout_S)
    ahead_S = centred_off_policy(steps.returns_S, to_the_end_S, floor, steps.state_S)
    of_rollout_R = centred_off_policy(batch.rewards_R, rollout_sums(moved_N, batch), floor, batch.group_R)
    others_S = has_spread(steps.rollout_S, steps.state_S)
    ahead_S = torch.where(others_S, ahead_S, of_rollout_R[steps.rollout_S])
    return on_policy_tokens(ahead_S[steps.step_P], batch)


@dataclass(frozen=True, slots=True)
class BatchSteps:
    """The steps of a batch: what they earned, where they began, and which tokens they made.

    returns_S float64, discounted · state_S int64, equal for steps of one group that began in the same state
    rollout_S int64 · step_P int64, the step of each policy token
    """

    returns_S: Tensor
    state_S: Tensor
    rollout_S: Tensor
    step_P: Tensor

    @staticmethod
    def of(batch: MicroBatch, gamma: float) -> BatchSteps:
        """A policy token outside every step goes with the step before it; those before the first step are a step that
        begins in the state 0. Raises TrainingError where the groups came without steps.
        """
        mask_N = batch.loss_mask_N
        number_P, anchor_P = column(batch, "step")[mask_N].long(), column(batch, "anchor")[mask_N]
        step_P = _numbered(batch.seq_N[mask_N], number_P)
        steps = int(step_P[-1]) + 1 if len(step_P) else 0
        first_P = torch.cat([step_P.new_ones(1), step_P.diff()])[: len(step_P)].bool()
        rollout_S = batch.seq_N[mask_N][first_P]
        earned_S = zeros(steps).index_add_(0, step_P, token_rewards(batch)[mask_N])
        return BatchSteps(
            returns_S=reverse_sums(earned_S, zeros(batch.rollouts) + gamma, rollout_S),
            state_S=_paired(batch.group_R[rollout_S], anchor_P[first_P]),
            rollout_S=rollout_S,
            step_P=step_P,
        )

    def one_state_more(self, context_S: Tensor) -> Tensor:
        """int64 [S]: equal for steps that began in the same state and whose predecessors' contexts are equal. A step
        without a predecessor shares its context with none.

            states      a b c | d b c     of two rollouts
            state_S     0 1 2 | 3 1 2
            one more    1 2 3 | 0 4 3     both c come from b; one b comes from a, the other from d
            two more    1 3 4 | 0 2 5     and so do the two c through b
        """
        before_S = torch.arange(-1, -1 - len(context_S), -1)
        follows_S = self.rollout_S[1:] == self.rollout_S[:-1]
        before_S[1:] = torch.where(follows_S, context_S[:-1], before_S[1:])
        return _paired(before_S, self.state_S)


def _numbered(owner_P: Tensor, number_P: Tensor) -> Tensor:
    """int64 [P], from 0, rising by 1 wherever a new rollout or, within one, a new step begins.

        owner_P   0  0  0  0 |  1  1  1
        number_P −1  0 −1  1 |  0  0 −1
        result    0  1  1  2 |  3  3  3

    −1 is no new step, but what comes before a rollout's first step is one of its own.
    """
    span = int(number_P.max()) + 2 if len(number_P) else 1
    return torch.unique((owner_P * span + number_P + 1).cummax(0).values, return_inverse=True)[1]


def _paired(first_S: Tensor, second_S: Tensor) -> Tensor:
    """int64 [S], from 0: equal where both are equal."""
    return torch.unique(torch.stack([first_S, second_S]), dim=1, return_inverse=True)[1]
