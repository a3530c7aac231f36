"""The objective of each model that learns: its outputs for a micro-batch → a sum to differentiate, and metrics.

    policy            π ── ρ = π/π_p ── loss(ρ, A), KL to a teacher ─┐
                      π_p ─ w = π_p/μ ─ correction ─────────┬────────┘
                                                            └─▸ Σ share_N · (w_N · loss_N + entropy, KL and LM terms)
    critics           V, clipped around V at the version's start ── against the returns
    reward model      σ(implicit reward of the rollout)          ── against its success

The sum over the global batch is divided by `denominator` of the counts there.

`total` runs on the model's device, where nothing may depend on a value: the thread would wait for all work that is
queued. Calls, with metrics, are for tensors on the CPU.

Axes:  N tokens · P policy tokens · R rollouts · O outcomes at a token: the teacher's most likely tokens, and all others
together
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from asyncrl.config.schema import Config
from asyncrl.config.sections.algorithm import AlgorithmConfig, KlLossConfig, TeacherLossConfig
from asyncrl.errors import TrainingError
from asyncrl.learner.algorithms.corrections import (
    Drift,
    correction_weights,
    geometric_means,
    unrejected,
)
from asyncrl.learner.algorithms.losses.aggregation import AGGREGATIONS, Counts
from asyncrl.learner.algorithms.losses.policy_loss import (
    PolicyTerms,
    TokenLoss,
    forward_kl,
    kl,
    policy_loss,
    proximal,
)
from asyncrl.learner.algorithms.reductions import column, policy_tokens, rollout_sums, succeeded
from asyncrl.learner.algorithms.registry import loss_of
from asyncrl.learner.algorithms.roles import role_of
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.reporting.batch_metrics import age_metrics, teacher_metrics, token_metrics
from asyncrl.telemetry.metrics import Mean, Metrics
from asyncrl.types import Version

MOVES_WITHOUT_ADVANTAGE: Final = frozenset({"sppo", "kl_cov", "dro"})
"""Losses with a gradient where the advantage is 0: a target of 0, a penalty."""

WEIGHED_BY_ROLLOUT: Final = frozenset({"gmpo"})
"""Losses that take the off-policy weights as they take the ratios: by their geometric mean over the rollout."""

TOKEN_MEAN: Final = AGGREGATIONS["token-mean"]


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The section `algorithm:`. norm_tokens: the constant of 'seq-mean-token-sum-norm'."""

    config: AlgorithmConfig
    norm_tokens: int

    def __call__(
        self,
        batch: MicroBatch,
        logp_N: Tensor,
        entropy_N: Tensor,
        outcome_NO: Tensor | None = None,
        version: Version = 0,
    ) -> tuple[Tensor, Metrics]:
        """(scalar sum, metrics), while `version` is trained. Inputs are 0 outside the mask. outcome_NO: log-probs of
        the outcomes, for the form topk of `teacher_loss`. The columns weight, kept, selected and lm are used where
        `Experience` has added them."""
        total, clipped_N, weight_N = self._evaluate(batch, version, logp_N, entropy_N, outcome_NO)
        batch, start_N = unrejected(batch), batch.columns.get("proximal", logp_N.detach())
        metrics = token_metrics(batch, start_N, entropy_N.detach(), clipped_N, weight_N)
        metrics.merge([age_metrics(batch, start_N, clipped_N, version)])
        if outcome_NO is not None:
            metrics.merge([teacher_metrics(batch, outcome_NO.detach())])
        return total, metrics

    def total(self, batch: MicroBatch, *outputs: Tensor, version: Version = 0) -> Tensor:
        """The sum alone."""
        return self._evaluate(batch, version, *outputs)[0]

    def _evaluate(
        self,
        batch: MicroBatch,
        version: Version,
        logp_N: Tensor,
        entropy_N: Tensor,
        outcome_NO: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(the sum, which tokens the loss holds back, their weights)."""
        now_N = logp_N.detach()
        proximal_N = proximal(batch, now_N, self.config, version)
        weight_N = batch.columns.get("weight")
        if weight_N is None:  # from all policy tokens, rejected ones included
            weight_N = correction_weights(
                Drift.of(proximal_N - batch.behaviour_N, batch), self.config.correction
            )
        batch = unrejected(batch)
        loss = policy_loss(PolicyTerms.of(batch, logp_N, proximal_N), self.config)
        if self.config.built_in_loss in WEIGHED_BY_ROLLOUT:
            weight_N = geometric_means(weight_N, batch)
        weighed_N = loss.loss_N + teacher_term(self.config.teacher_loss, logp_N, outcome_NO, batch)
        per_token_N = weight_N * weighed_N + other_terms(logp_N, entropy_N, batch, self.config)
        share_N = self._share(batch).to(per_token_N.dtype)
        # where, not a product: values outside the mask may be infinite, and 0 · ∞ is not 0.
        total = (torch.where(batch.loss_mask_N, per_token_N, 0.0) * share_N).sum()
        return total, loss.clipped_N, weight_N

    def counts(self, batch: MicroBatch) -> Counts:
        """Without the tokens that the correction rejects."""
        return Counts.of(unrejected(batch))

    def divided(self, batch: MicroBatch) -> MicroBatch:
        """The batch, cut into segments where the loss of a token depends on no other segment of its rollout."""
        correction = self.config.correction
        weighed = (
            correction.kind != "none" and correction.level == "sequence" and "weight" not in batch.columns
        )
        if weighed or "rollout" in loss_of(self.config).needs or batch.segments == batch.rollouts:
            return batch
        return batch.with_columns(share=self._share(unrejected(batch))).by_segment()

    def _share(self, batch: MicroBatch) -> Tensor:
        """[N]: what the aggregation multiplies each token with, made where its whole rollout is in the batch."""
        if "share" in batch.columns:
            return batch.columns["share"]
        return AGGREGATIONS[self.config.aggregation].weights(batch, self.norm_tokens)

    def denominator(self, counts: Counts) -> float:
        """1 for a global batch without a policy token, whose sum is 0."""
        return float(max(1, AGGREGATIONS[self.config.aggregation].denominator(counts)))

    @property
    def skips_flat_groups(self) -> bool:
        """Whether a group without advantages adds exactly nothing to the gradient."""
        config = self.config
        beside = config.entropy_bonus or config.kl_terms or config.lm_coef or config.own_loss
        return not beside and config.loss not in MOVES_WITHOUT_ADVANTAGE


def other_terms(logp_N: Tensor, entropy_N: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """[N]: −bonus · H + coef · KL(π‖reference) − coef · lm · log π, added to the policy loss of each token. The column
    `lm` weighs the imitation of rollouts that succeeded.

    Raises TrainingError for a batch without a column that `config` needs for them.
    """
    total_N = kl_term("reference", config.kl_loss, logp_N, batch)
    if config.entropy_bonus:
        total_N = total_N - config.entropy_bonus * entropy_N
    if config.lm_coef:
        total_N = total_N - config.lm_coef * column(batch, "lm") * logp_N
    return total_N


def teacher_term(
    term: TeacherLossConfig, logp_N: Tensor, outcome_NO: Tensor | None, batch: MicroBatch
) -> Tensor:
    """[N]: as `kl_term`, to the teacher. outcome_NO: for the form topk."""
    if not term.likeliest:
        return kl_term("teacher", term, logp_N, batch)
    if outcome_NO is None:
        raise TrainingError(
            "the backend gives no log-probs of the teacher's most likely tokens, from which "
            "algorithm.teacher_loss.form=topk learns: use learner.backend=fsdp or megatron, or another form"
        )
    mask_N1 = batch.loss_mask_N[:, None]
    pair = (torch.where(mask_N1, each, 0.0) for each in (outcome_NO, column(batch, "teacher_likeliest")))
    return term.coef * forward_kl(*pair)


def kl_term(model: str, term: KlLossConfig, logp_N: Tensor, batch: MicroBatch) -> Tensor:
    """[N]: coef · KL(π‖model), 0 for a coef of 0. Raises TrainingError for a batch without the model's column."""
    if not term.coef:
        return torch.zeros_like(logp_N)
    # Masked before the KL, not after it: its slope at what stands outside may be NaN, and 0 · NaN is not 0.
    inside_N = torch.where(batch.loss_mask_N, logp_N, 0.0)
    other_N = torch.where(batch.loss_mask_N, column(batch, model), 0.0)
    return term.coef * kl(inside_N, other_N, term.form)


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """A critic's objective: the mean over policy tokens of `value_loss`.

    values, returns   the columns of V at the version's start, and of the targets
    clip              ε_v
    """

    name: str
    values: str
    returns: str
    clip: float | None

    @property
    def reads(self) -> tuple[str, ...]:
        """Its columns."""
        return (self.values, self.returns)

    def __call__(self, batch: MicroBatch, values_N: Tensor, version: Version = 0) -> tuple[Tensor, Metrics]:
        """(sum over policy tokens, metrics)."""
        metrics, clipped_P = Metrics(), self._loss(batch, values_N).clipped_N[batch.loss_mask_N]
        metrics.add(f"train/{self.name}/clip_fraction", Mean(float(clipped_P.sum()), len(clipped_P)))
        return self.total(batch, values_N), metrics

    def total(self, batch: MicroBatch, values_N: Tensor, version: Version = 0) -> Tensor:
        """The sum alone."""
        loss_N = self._loss(batch, values_N).loss_N
        share_N = TOKEN_MEAN.weights(batch, 1).to(loss_N.dtype)
        return (torch.where(batch.loss_mask_N, loss_N, 0.0) * share_N).sum()

    def _loss(self, batch: MicroBatch, values_N: Tensor) -> TokenLoss:
        return value_loss(values_N, column(batch, self.values), column(batch, self.returns), self.clip)

    def counts(self, batch: MicroBatch) -> Counts:
        return Counts.of(batch)

    def divided(self, batch: MicroBatch) -> MicroBatch:
        return batch.by_segment()

    def denominator(self, counts: Counts) -> float:
        return float(max(1, TOKEN_MEAN.denominator(counts)))


def value_loss(values_N: Tensor, old_N: Tensor, returns_N: Tensor, clip: float | None) -> TokenLoss:
    """½ · max((V − G)², (clip(V, V_old ± ε) − G)²) per token; without ε, ½ (V − G)².

    values_N V with its gradient, old_N V_old at the version's start, returns_N G. clipped_N: where the clipped square
    is the larger one, and there is no gradient. Source: PPO2 of OpenAI baselines, the value function of arXiv
    1707.06347.
    """
    plain_N = (values_N - returns_N) ** 2
    if clip is None:
        return TokenLoss(0.5 * plain_N, torch.zeros_like(plain_N, dtype=torch.bool))
    held_N = torch.clamp(values_N, old_N - clip, old_N + clip)
    bounded_N = (held_N - returns_N) ** 2
    return TokenLoss(0.5 * torch.maximum(plain_N, bounded_N), bounded_N > plain_N)


@dataclass(frozen=True, slots=True)
class OutcomeObjective:
    """The implicit reward model's objective: cross-entropy of σ(r(y)) against success, the mean over rollouts.

    r(y) = β Σ_t (log π_prm − log π_ref) over the policy tokens of the rollout. Source: PRIME, arXiv 2502.01456.
    """

    beta: float

    @property
    def reads(self) -> tuple[str, ...]:
        """Its columns."""
        return ("reference", "outcome")

    def __call__(
        self, batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor, version: Version = 0
    ) -> tuple[Tensor, Metrics]:
        """(sum over rollouts, metrics)."""
        counted_R = policy_tokens(batch) > 0
        right_R = counted_R & ((self._rewards(batch, logp_N) > 0) == succeeded(batch))
        metrics = Metrics()
        metrics.add("train/reward_model/accuracy", Mean(float(right_R.sum()), float(counted_R.sum())))
        return self.total(batch, logp_N, entropy_N), metrics

    def total(self, batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor, version: Version = 0) -> Tensor:
        """The sum alone."""
        reward_R = self._rewards(batch, logp_N)
        success_R = succeeded(batch).to(reward_R.dtype)
        loss_R = binary_cross_entropy_with_logits(reward_R, success_R, reduction="none")
        return (loss_R * (policy_tokens(batch) > 0) * batch.copies_R).sum()

    def _rewards(self, batch: MicroBatch, logp_N: Tensor) -> Tensor:
        """[R]: r(y)."""
        reference_N = column(batch, "reference").to(logp_N.dtype)
        return self.beta * rollout_sums(logp_N - reference_N, batch)

    def counts(self, batch: MicroBatch) -> Counts:
        return Counts.of(batch)

    def divided(self, batch: MicroBatch) -> MicroBatch:
        return batch

    def denominator(self, counts: Counts) -> float:
        return float(max(1, counts.rollouts))


def auxiliary_objective(name: str, config: Config) -> ValueObjective | OutcomeObjective:
    """The objective of a model beside the policy, wherever it learns."""
    role = role_of(name, config.algorithm)
    match role.kind:
        case "critic":
            return ValueObjective(name, role.outputs, role.returns, config.critic.clip)
        case "reward_model":
            return OutcomeObjective(config.algorithm.prm_beta)
    raise ValueError(f"the {name} does not learn")
