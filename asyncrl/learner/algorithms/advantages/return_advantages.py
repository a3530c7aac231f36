"""Advantages of single tokens: from what comes after each of them, with or without a critic.

r_t are the rewards as they fall along a rollout (`reductions.token_rewards`), V_t is a critic's value of the state
before token t. Tokens that the policy did not make are skipped: t + 1 is the rollout's next policy token.

Axes:  R rollouts · N tokens
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.errors import TrainingError
from asyncrl.learner.algorithms.corrections import Drift, correction_weights
from asyncrl.learner.algorithms.reductions import (
    above_least,
    at_last_token,
    column,
    group_sums,
    leave_one_out,
    of_next_token,
    on_policy_tokens,
    places,
    policy_tokens,
    returns_to_go,
    reward_part,
    rollout_means,
    running_sums,
    token_rewards,
    whiten,
)
from asyncrl.learner.algorithms.registry import AlgorithmContext, advantage, advantage_of, needs
from asyncrl.learner.algorithms.roles import ROLES
from asyncrl.learner.data.batch import MicroBatch

LEAST_PATH = 1e-8
"""Added to W of the optimal token baseline: where the policy is certain of all tokens, the baseline is the mean."""

MAX_LOG_STEP = 1.0
"""Largest change of a multiplier's logarithm in one version, so that no single version drives it to 0."""


@advantage("gae", source="GAE, arXiv 1506.02438, eq. 16", needs={"critic", "batch"})
def gae(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """A_t = δ_t + γλ · A_{t+1} with δ_t = r_t + γV_{t+1} − V_t, whitened over the policy tokens of the batch."""
    return whiten(reward_advantages(batch, config, config.lam), batch, context.gather)


@advantage("vapo", source="VAPO, arXiv 2504.05118", needs={"critic", "batch"})
def vapo(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """gae with λ = max(0, 1 − 1 / (α · length)) for each rollout's length in policy tokens, whitened over the batch.

    The critic learns from returns with λ = 1 (`value_targets`), so that neither decays over a long rollout.
    """
    return whiten(reward_advantages(batch, config, adaptive_lambda(batch, config)), batch, context.gather)


@advantage("safe_rlhf", source="Safe RLHF, arXiv 2310.12773", needs={"critic", "cost_critic", "parts"})
def safe_rlhf(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """(A_reward − λ · A_cost) / (1 + λ): gae of the reward and of the cost, weighed by the Lagrange multiplier.

    The cost is the reward part `cost_part`, on the last policy token. A KL inside the reward stays with the reward; the
    paper gives half of it to the cost.
    """
    multiplier = context.cost_multiplier
    reward_N = reward_advantages(batch, config, config.lam)
    cost_N = cost_advantages(batch, config)
    return (reward_N - multiplier * cost_N) / (1 + multiplier)


@advantage("reinforce_pp", source="REINFORCE++, arXiv 2501.03262", needs={"batch"})
def reinforce_pp(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """G_t = r_t + γ · G_{t+1}, whitened over the policy tokens of the batch; the KL to a reference belongs into r."""
    return whiten(returns_to_go(token_rewards(batch), config.gamma, batch), batch, context.gather)


@advantage("remax", source="ReMax, arXiv 2310.10505", needs={"greedy"})
def remax(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """Σ_{s≥t} r_s − R of one greedy rollout of the same task."""
    missing_R = batch.greedy_R.isnan() & (policy_tokens(batch) > 0)
    if missing_R.any():
        ordinal = int(batch.ordinals_R[missing_R][0])
        raise TrainingError(f"task {ordinal} lacks the reward of a greedy rollout, which remax compares with")
    return returns_to_go(token_rewards(batch), 1.0, batch) - batch.greedy_R.double()[batch.seq_N]


@advantage(
    "optimal_token_baseline",
    source="Optimal Token Baseline, arXiv 2602.07078",
    needs={"group", "squares"},
)
def optimal_token_baseline(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """G_t − Σ W_t · G_t / Σ W_t over the t-th policy tokens of the group, with W_t = Σ_{j≤t} (1 − 2π_j + Σπ_j²).

    W stands for the squared norm of the gradient up to the token: the baseline is the one of least variance. π is the
    policy at the version's start; with a `correction` each part of W has its weight squared. A token past the end of
    all other rollouts of its group gets 0. This is both of verl's, optimal_token_baseline and, since only policy tokens
    count, tir_optimal_token_baseline; where `handle_zero_tail` is set, verl leaves G_t to the tokens that get 0 here.
    """
    mask_N, policy_N = batch.loss_mask_N, column(batch, "proximal").double()
    drift = Drift.of(policy_N - batch.behaviour_N, batch)
    weight_N = correction_weights(drift, dataclasses.replace(config.correction, normalise=False))
    norm_N = (1 - 2 * policy_N.exp() + column(batch, "squares").double()).clamp(min=0) * weight_N**2
    owner_P = batch.seq_N[mask_N]
    _, peers_P = torch.stack([batch.group_R[owner_P], places(owner_P)]).unique(dim=1, return_inverse=True)
    gain_P = above_least(returns_to_go(token_rewards(batch), 1.0, batch)[mask_N], peers_P)
    path_P = running_sums(norm_N[mask_N], owner_P) + LEAST_PATH
    baseline_P = group_sums(path_P * gain_P, peers_P) / group_sums(path_P, peers_P)
    return on_policy_tokens(gain_P - baseline_P, batch)


@advantage("prime", source="PRIME, arXiv 2502.01456", needs={"group", "reward_model", "reference"})
def prime(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """rloo of R + Σ_{s≥t} γ^{s−t} (r_s − mean of the others' mean r), with r = β(log π_prm − log π_ref).

    The others are those of the group. verl's recipe has n / (n − 1) · r_s − Σ of the group's means, the rollout's own
    too, / (n − 1) in the place of the bracket, normalises that over the batch, has γ = 1, and whitens the sum.
    """
    implicit_N = config.prm_beta * (
        column(batch, "reward_model").double() - column(batch, "reference").double()
    )
    mean_R = rollout_means(implicit_N, batch)
    others_R = mean_R - leave_one_out(mean_R, batch.group_R)  # in a group of one its own mean
    process_N = returns_to_go(implicit_N - others_R[batch.seq_N], config.gamma, batch)
    return process_N + leave_one_out(batch.rewards_R, batch.group_R)[batch.seq_N]


@advantage(
    "distill",
    source="On-Policy Distillation, Thinking Machines Lab 2025; GKD, 2306.13649",
    needs={"teacher", "proximal"},
)
def distill(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """log π_teacher − log π: minus the reverse KL to the teacher, one sample of it per token.

    π is the policy at the version's start, the column `proximal`: μ in its place would add the gradient of KL(π‖μ) on
    stale tokens. A batch without that column counts as made by π itself. Later tokens have no influence (γ = 0),
    and the rewards of the rollouts are not used.
    """
    policy_N = batch.columns.get("proximal", batch.behaviour_N)
    return column(batch, "teacher").double() - policy_N.double()


def value_targets(batch: MicroBatch, config: AlgorithmConfig) -> dict[str, Tensor]:
    """Targets of the critics that the algorithm needs: the columns `returns` and `cost_returns` [N] float32, unwhitened
    advantages plus values, 0 outside the mask; and those of the user's critics. Those of vapo have λ = 1.

    Raises TrainingError for targets of a user that are not one number per token.
    """
    entry, needed = advantage_of(config), needs(config)
    targets: dict[str, Tensor] = {}
    if "critic" in needed:
        lam = 1.0 if entry.function is vapo else config.lam
        targets["returns"] = reward_advantages(batch, config, lam) + column(batch, "values")
    if "cost_critic" in needed:
        targets["cost_returns"] = cost_advantages(batch, config) + column(batch, "cost_values")
    for name, role in ROLES.items():
        if name in needed and role.targets is not None:
            made = targets[role.returns] = role.targets(batch, config)
            if made.shape != batch.token_ids_N.shape:
                rule = f"[{batch.tokens}] are needed, one for each token"
                raise TrainingError(
                    f"the targets of the critic {name} have the shape {list(made.shape)}; {rule}"
                )
    return {name: torch.where(batch.loss_mask_N, each_N, 0.0).float() for name, each_N in targets.items()}


def next_multiplier(multiplier: float, mean_cost: float, config: AlgorithmConfig) -> float:
    """λ of safe_rlhf after a version: log λ += α · λ · (mean cost − limit), at most `cost_multiplier_max`.

    The step grows with λ itself: without the bound λ would be infinite after some versions. Source: arXiv 2310.12773;
    the bound is the `lambda_max` of its authors' code. The bound of a single step, ±1, is ours.
    """
    step = config.cost_lr * multiplier * (mean_cost - config.cost_limit)
    moved = multiplier * math.exp(max(-MAX_LOG_STEP, min(MAX_LOG_STEP, step)))
    return min(moved, config.cost_multiplier_max)


def reward_advantages(batch: MicroBatch, config: AlgorithmConfig, lam_R: Tensor | float) -> Tensor:
    """[N]: gae of the reward, unwhitened; λ for all rollouts or one for each."""
    return generalised_advantages(token_rewards(batch), column(batch, "values"), config.gamma, lam_R, batch)


def cost_advantages(batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """[N]: gae of the cost, unwhitened."""
    costs_N = at_last_token(reward_part(batch, config.cost_part), batch)
    return generalised_advantages(costs_N, column(batch, "cost_values"), config.gamma, config.lam, batch)


def generalised_advantages(
    rewards_N: Tensor, values_N: Tensor, gamma: float, lam_R: Tensor | float, batch: MicroBatch
) -> Tensor:
    """[N]: A_t = δ_t + γλ · A_{t+1}, δ_t = r_t + γV_{t+1} − V_t; V after the last policy token is 0."""
    delta_N = rewards_N + gamma * of_next_token(values_N, batch) - values_N.double()
    return returns_to_go(delta_N, gamma * lam_R, batch)


def adaptive_lambda(batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """[R]: max(0, 1 − 1 / (α · length))."""
    length_R = policy_tokens(batch).clamp(min=1).double()
    return (1 - 1 / (config.vapo_alpha * length_R)).clamp(min=0)
