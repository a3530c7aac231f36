"""The policy's objective: log-probs of a micro-batch → a sum to differentiate, and everything worth knowing.

    π ── ρ = π/π_p ── loss(ρ, A) ─┐
    π_p ─ w = π_p/μ ─ correction ─┴─▸ Σ share_N · (w_N · loss_N + entropy, KL and LM terms)   over the denominator

Axes:  N tokens · R rollouts
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.corrections import correction_weights, geometric_means
from asyncrl.learner.algorithms.losses.aggregation import AGGREGATIONS, Counts
from asyncrl.learner.algorithms.losses.losses import PolicyTerms, policy_loss
from asyncrl.learner.algorithms.losses.terms import entropy_term, kl_term, lm_term
from asyncrl.learner.algorithms.proximal import loglinear_proximal
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.reporting.batch_metrics import age_metrics, token_metrics
from asyncrl.telemetry.metrics import Metrics
from asyncrl.types import Version

MOVES_WITHOUT_ADVANTAGE: Final = frozenset({"sppo", "kl_cov"})
"""Losses with a gradient where the advantage is 0: a target of 0, a penalty."""

WEIGHED_BY_ROLLOUT: Final = frozenset({"gmpo"})
"""Losses that take the off-policy weights as they take the ratios: by their geometric mean over the rollout."""


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """`algorithm:` resolved. norm_tokens: the constant of 'seq-mean-token-sum-norm'."""

    config: AlgorithmConfig
    norm_tokens: int

    def __call__(
        self, batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor, version: Version = 0
    ) -> tuple[Tensor, Metrics]:
        """(scalar sum, to be divided by `denominator`; metrics), while `version` is trained. Both inputs are 0 where
        the mask is 0. The columns weight, kept, selected and lm are used where `Experience` made them."""
        now_N = logp_N.detach()
        proximal_N = proximal(batch, now_N, self.config, version)
        weight_N = self._weights(batch, proximal_N)
        batch = unrejected(batch)
        loss = policy_loss(PolicyTerms.of(batch, logp_N, proximal_N), self.config)
        if self.config.loss in WEIGHED_BY_ROLLOUT and not self.config.own_loss:
            weight_N = geometric_means(weight_N, batch.loss_mask_N, batch.seq_N, batch.rollouts)
        per_token_N = weight_N * loss.loss_N + self._other_terms(batch, logp_N, entropy_N)
        share_N = AGGREGATIONS[self.config.aggregation].weights(batch, self.norm_tokens).to(per_token_N.dtype)
        # where, not a product: what stands outside the mask may be infinite, and 0 · ∞ is not 0.
        total = (torch.where(batch.loss_mask_N, per_token_N, 0.0) * share_N).sum()
        start_N = batch.columns.get("proximal", now_N)
        measured = token_metrics(batch, start_N, entropy_N.detach(), loss.clipped_N, weight_N)
        measured.merge([age_metrics(batch, start_N, loss.clipped_N, version)])
        return total, measured

    def counts(self, batch: MicroBatch) -> Counts:
        """Of what the correction does not reject."""
        return Counts.of(unrejected(batch))

    def denominator(self, counts: Counts) -> float:
        """Of the global batch; 1 for one without a policy token, whose sum is 0 anyway."""
        return float(max(1, AGGREGATIONS[self.config.aggregation].denominator(counts)))

    @property
    def skips_flat_groups(self) -> bool:
        """Whether a group without advantages adds exactly nothing to the gradient."""
        config = self.config
        beside = config.entropy_bonus or config.kl_loss.coef or config.lm_coef or config.own_loss
        return not beside and config.loss not in MOVES_WITHOUT_ADVANTAGE

    def _weights(self, batch: MicroBatch, proximal_N: Tensor) -> Tensor:
        """w_N of the off-policy correction, made of all policy tokens, rejected ones too."""
        if "weight" in batch.columns:
            return batch.columns["weight"]
        log_w_N = proximal_N - batch.behaviour_N
        tokens = (batch.loss_mask_N, batch.seq_N, batch.rollouts)
        return correction_weights(log_w_N, *tokens, self.config.correction)

    def _other_terms(self, batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor) -> Tensor:
        terms_N = torch.zeros_like(logp_N)
        if self.config.entropy_bonus:
            terms_N = terms_N + entropy_term(entropy_N, self.config)
        if self.config.kl_loss.coef:
            terms_N = terms_N + kl_term(logp_N, batch, self.config)
        if self.config.lm_coef:
            terms_N = terms_N + lm_term(logp_N, batch, self.config)
        return terms_N


def unrejected(batch: MicroBatch) -> MicroBatch:
    """The batch without the policy tokens that the off-policy correction leaves out, by the column `kept`. That is the
    policy's business alone: critics and the reward model learn from them too."""
    kept_N = batch.columns.get("kept")
    return batch if kept_N is None else dataclasses.replace(batch, loss_mask_N=batch.loss_mask_N & kept_N)


def proximal(batch: MicroBatch, now_N: Tensor, config: AlgorithmConfig, version: Version) -> Tensor:
    """log π_p [N]. now_N: log-probs of the policy as it is, no gradient; the column `proximal`, where there is one, has
    those of the version's start."""
    if config.proximal == "behaviour":
        return batch.behaviour_N
    if config.proximal == "loglinear":
        return loglinear_proximal(batch.behaviour_N, now_N, batch.versions_N, version)
    return batch.columns.get("proximal", now_N)
