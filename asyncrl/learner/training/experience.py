"""From groups to a batch that is ready to train on.

    groups ─▸ tokens ─▸ columns of the ───▸ shaped rewards ─▸ advantages, ─▸ weights against
                        other models                          returns        the behaviour policy
              └── score(), per claim ───┘ └── ready(), per claim or for the whole version ──┘

A model's pass, and an exchange among ranks, is made by every rank, with groups or without. Where a claim needs neither,
`ready` may run in any thread.

Axes:  N tokens · R rollouts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.advantages import advantages
from asyncrl.learner.algorithms.advantages.return_advantages import next_multiplier, value_targets
from asyncrl.learner.algorithms.corrections import Drift, correction_weights, kept, unrejected
from asyncrl.learner.algorithms.losses.aggregation import lm_weights
from asyncrl.learner.algorithms.losses.covariance_losses import select_covariance
from asyncrl.learner.algorithms.losses.policy_loss import proximal
from asyncrl.learner.algorithms.reductions import column
from asyncrl.learner.algorithms.registry import AlgorithmContext, needs
from asyncrl.learner.algorithms.roles import POLICY, ROLES
from asyncrl.learner.algorithms.shaping import next_kl_coef, shape
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.packing import bins
from asyncrl.learner.models.networks import counts_prompts_once
from asyncrl.learner.training import requirements
from asyncrl.telemetry.metrics import Mean, Metrics
from asyncrl.telemetry.spans import Spans
from asyncrl.types import Array, Group, Version

Predict = Callable[[MicroBatch], Tensor]

NO_ROWS = torch.zeros(0, dtype=torch.int64)

SELECTING = ("clip_cov", "kl_cov")
"""Losses that treat selected tokens of an optimizer step differently."""


class Experience:
    """Collective: every method; but `ready` only where the algorithm needs the whole batch.

    predicts     whether `score` makes passes
    ready_alone  whether `ready` needs the groups of one claim and nothing else: no pass, no other claim or rank, and no
                 coefficient that the version before has adapted. Code of the user stays in the trainer's thread
    """

    def __init__(self, backend: Backend, config: Config, spans: Spans) -> None:
        self._backend, self._config, self._spans = backend, config, spans
        self._shares = counts_prompts_once(POLICY, config)
        self._proximal = requirements.proximal_pass(config)
        self._models: dict[str, Predict] = {
            requirements.column_of(name, config): model.predict for name, model in backend.models.items()
        }
        if self._proximal:
            self._models["proximal"] = backend.policy.predict
        if "squares" in needs(config.algorithm):
            self._models["sharper"] = lambda batch: backend.policy.predict(_at_half_temperature(batch))
        self.predicts = bool(self._models)
        algorithm, whole = config.algorithm, requirements.whole_batch(config)
        adapts = AdaptiveCoefficients.start(algorithm).adapted(algorithm)
        targets = any(ROLES[name].targets is not None for name in requirements.models(config))
        self.ready_alone = not (self.predicts or whole or adapts or algorithm.own_advantage or targets)

    def score(self, batch: MicroBatch | None) -> MicroBatch | None:
        """One claim's groups, with a column of each other model's outputs and, where it is needed, `proximal`: the
        policy's own log-probs before it moves. None, and returns None, if this rank has no groups."""
        columns = self.predict(self._models, batch)
        if (sharper_N := columns.pop("sharper", None)) is not None:
            columns["squares"] = (2 * columns["proximal"] - sharper_N).exp()
        return batch and batch.with_columns(**columns)

    def ready(
        self, batch: MicroBatch, version: Version, controls: AdaptiveCoefficients
    ) -> tuple[MicroBatch, Metrics]:
        """A scored batch with shaped rewards and advantages, and its metrics. It also gets the columns

            outcome                 the reward of the token's rollout before any shaping
            returns, cost_returns   the critics' targets
            teacher_likeliest, likeliest
                                    see `MicroBatch`, where the teacher has them
            kept, weight            bool, the tokens that the off-policy correction keeps; and its weights, where they
                                    stay the same for the whole version

        A rank without groups has an empty batch where all ranks must call. Raises TrainingError where the groups lack
        something that the algorithm needs.
        """
        config, context = self._config.algorithm, self._context(version, controls.cost_multiplier)
        batch = _with_likeliest(batch).with_columns(outcome=batch.rewards_R[batch.seq_N])
        batch, shaped = shape(batch, config, self._config.generator.max_tokens, controls.kl_coef, context)
        batch = batch.with_columns(**value_targets(batch, config))
        corrected, rejected = self._corrected(batch, version) if self._proximal else (batch, Metrics())
        judged = unrejected(corrected) if config.correction.reject_first else batch
        batch = corrected.with_advantages(advantages(judged, config, context))
        return batch, Metrics.of([rejected, shaped])

    def logprobs(self, groups: Sequence[Group]) -> list[Array]:
        """The policy's log-probs of each group's tokens as it is now, in their order; 0 where the mask is 0."""
        batch = MicroBatch.of(groups) if groups else None
        column_N = self.predict({"now": self._backend.policy.predict}, batch)["now"]
        return (
            np.split(column_N.numpy(), np.cumsum([group.tokens for group in groups])[:-1]) if groups else []
        )

    def for_step(self, batch: MicroBatch | None, version: Version, moved: bool) -> MicroBatch | None:
        """The batch of one optimizer step, with the columns that depend on all groups in that step.

            lm         weights of the LM loss
            selected   tokens that some losses treat differently, by the policy as it is

        moved: whether the policy has moved since `score`.
        """
        config = self._config.algorithm
        selects = config.built_in_loss in SELECTING
        if not selects and not config.lm_coef:
            return batch
        some, columns = unrejected(batch or MicroBatch.empty()), {}
        if config.lm_coef:
            columns["lm"] = lm_weights(some, config, requirements.norm_tokens(self._config), self._gather)
        if selects:
            now_N = column(some, "proximal")
            if moved:
                now_N = self.predict({"now": self._backend.policy.predict}, batch)["now"]
            old_N = proximal(some, now_N, config, version)
            columns["selected"] = select_covariance(some, now_N, old_N, config, self._context(version))
        return batch and batch.with_columns(**columns)

    def _corrected(self, batch: MicroBatch, version: Version) -> tuple[MicroBatch, Metrics]:
        """Adds `kept` and `weight`. With `proximal: loglinear`, π_p depends on the current policy: rejections are
        computed once per version, weights in every optimizer step. (Normalised weights cannot be, and need single
        steps.)"""
        config, start_N = self._config.algorithm, column(batch, "proximal")
        drift = Drift.of(proximal(batch, start_N, config, version) - batch.behaviour_N, batch)
        columns = {"kept": kept(drift, config.correction, self._gather)}
        if config.proximal != "loglinear" or config.correction.normalise:
            columns["weight"] = correction_weights(drift, config.correction, self._gather)
        metrics, tokens = Metrics(), int(batch.loss_mask_N.sum())
        metrics.add("train/rejected_fraction", Mean(tokens - int(columns["kept"].sum()), tokens))
        return batch.with_columns(**columns), metrics

    def predict(self, models: Mapping[str, Predict], batch: MicroBatch | None) -> dict[str, Tensor]:
        """A column of each model's outputs; those of an empty batch where this rank has none."""
        if not models:
            return {}
        pieces: list[tuple[Tensor, MicroBatch]] = []
        if batch is not None:
            each = batch.by_segment()
            most = self._config.learner.micro_batch_tokens
            packed = bins(each, range(each.rollouts), most, self._shares)
            pieces = [(each.tokens_of(segments), each.select(segments)) for segments in packed]
        with self._spans("wait/ranks"):
            passes = max(self._backend.exchange(len(pieces)))
        columns = {name: torch.zeros(batch.tokens if batch else 1) for name in models}
        for turn in range(passes):
            rows, piece = pieces[turn] if turn < len(pieces) else (NO_ROWS, MicroBatch.empty())
            for name, predict in models.items():
                with self._spans("compute/predict"):
                    values = predict(piece)
                if turn == 0 and values.ndim > 1:
                    columns[name] = torch.zeros(len(columns[name]), *values.shape[1:])
                columns[name][rows] = values[: len(rows)]
        return columns

    def _context(self, version: Version, multiplier: float = 1.0) -> AlgorithmContext:
        return AlgorithmContext(
            gather=self._gather,
            cost_multiplier=multiplier,
            part_weights=self._config.reward.weights,
            seed=(self._config.run.seed, version),
        )

    def _gather(self, mine: Tensor) -> list[Tensor]:
        with self._spans("wait/ranks"):
            return self._backend.gather(mine)


def _with_likeliest(batch: MicroBatch) -> MicroBatch:
    """With the teacher's [N, 2 + 2K] as the columns teacher [N], teacher_likeliest [N, O], its log-probs of the
    outcomes, and likeliest [N, K], the tokens."""
    teacher = batch.columns.get("teacher")
    if teacher is None or teacher.ndim == 1:
        return batch
    outcomes = teacher.shape[1] // 2
    outcome_NO, token_NK = teacher[:, 1 : 1 + outcomes].contiguous(), teacher[:, 1 + outcomes :].int()
    return batch.with_columns(
        teacher=teacher[:, 0].contiguous(), teacher_likeliest=outcome_NO, likeliest=token_NK
    )


def _at_half_temperature(batch: MicroBatch) -> MicroBatch:
    """For Σπ². With z the logits over the temperature, log π(y) = z_y − log Σ e^z, and log π'(y) = 2z_y − log Σ e^2z at
    half of it; so 2 log π(y) − log π'(y) = log (Σ e^2z / (Σ e^z)²) = log Σπ², whatever y is."""
    return replace(batch, temperature_R=batch.temperature_R / 2)


@dataclass(frozen=True, slots=True)
class AdaptiveCoefficients:
    """Two coefficients that a run adapts once per version, from means over the global batch.

    kl_coef: β of the KL inside the reward · cost_multiplier: λ of safe_rlhf
    """

    kl_coef: float
    cost_multiplier: float

    @staticmethod
    def start(config: AlgorithmConfig) -> AdaptiveCoefficients:
        """The configured values."""
        return AdaptiveCoefficients(config.shaping.kl_coef, config.cost_multiplier)

    def adapted(self, config: AlgorithmConfig) -> dict[str, float]:
        """By name, those that adapt under `config`: what a checkpoint keeps and a metrics row shows."""
        adapting = {"kl_coef": _adapts_kl(config), "cost_multiplier": _adapts_multiplier(config)}
        return {name: value for name, value in asdict(self).items() if adapting[name]}

    def restored(self, adapted: Mapping[str, float], config: AlgorithmConfig) -> Self:
        """With the adapted values of a checkpoint; a coefficient that no longer adapts keeps its configured value."""
        names = self.adapted(config)
        return replace(self, **{name: value for name, value in adapted.items() if name in names})

    def after(self, means: Mapping[str, float], config: AlgorithmConfig) -> Self:
        """Those of the next version. means: the metrics of this one, over all ranks."""
        kl_coef, multiplier = self.kl_coef, self.cost_multiplier
        if _adapts_kl(config):
            kl_coef = next_kl_coef(
                kl_coef, means["train/kl/reward"], int(means["train/rollouts"]), config.shaping
            )
        if _adapts_multiplier(config):
            multiplier = next_multiplier(multiplier, means[f"rollout/reward/part/{config.cost_part}"], config)
        return replace(self, kl_coef=kl_coef, cost_multiplier=multiplier)


def _adapts_kl(config: AlgorithmConfig) -> bool:
    return config.shaping.kl_coef > 0 and config.shaping.kl_target is not None


def _adapts_multiplier(config: AlgorithmConfig) -> bool:
    return "cost_critic" in needs(config)
