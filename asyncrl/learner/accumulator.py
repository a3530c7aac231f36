"""One version's gradient, summed up claim by claim, and the one step that it makes.

    groups ─▸ advantages ─▸ pack ─▸ forward ─▸ objective ─▸ backward ─┐
       ▲      (per group)                                             │ sums of gradients, counts, metrics
       └──────────────── the next claim ◂─────────────────────────────┤
                                                                      └─▸ · 1 / denominator ─▸ optimizer step

Nothing here knows where groups come from: a plain loop over lists trains exactly like the stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.config.schema import Config
from asyncrl.learner.advantages import advantages
from asyncrl.learner.aggregation import Counts
from asyncrl.learner.backend import Backend
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.objective import Objective, batch_metrics, with_ratio_summary
from asyncrl.learner.packing import moving_rollouts, pack
from asyncrl.learner.schedule import learning_rate
from asyncrl.telemetry.metrics import Mean, Metrics, Sum
from asyncrl.telemetry.spans import Spans
from asyncrl.types import Group, Version


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did, over all ranks. grad_norm is the norm before clipping; if it is not finite
    the policy has not moved."""

    grad_norm: float
    lr: float
    values: dict[str, float]


class Accumulator:
    """The same calls on every rank, in the same order, whatever groups each of them holds."""

    def __init__(self, backend: Backend, config: Config, spans: Spans | None = None) -> None:
        self._backend, self._config = backend, config
        self._spans = spans or Spans()
        norm_tokens = config.algorithm.norm_tokens or config.generator.max_tokens
        self._objective = Objective(config.algorithm, norm_tokens)
        self._skip_flat = config.learner.skip_flat_groups and self._objective.skips_flat_groups
        self._counts = Counts()
        self._metrics = Metrics()

    def add(self, groups: Sequence[Group], version: Version) -> None:
        """Train on whole groups, for the policy of `version`. A rank without groups still takes part."""
        with self._spans("compute/pack"):
            micro_batches = self._prepare(groups, version) if groups else []
        with self._spans("wait/ranks"):
            passes = max(self._backend.exchange(len(micro_batches)))
        for turn in range(passes):
            batch = micro_batches[turn] if turn < len(micro_batches) else MicroBatch.empty()
            with self._spans("compute/forward_backward"):
                here, logp_N, entropy_N = self._backend.forward(batch)
                loss, metrics = self._objective(here, logp_N, entropy_N)
                self._backend.backward(loss)
            metrics.add("loss", Sum(float(loss.detach())))
            self._metrics.merge([metrics])

    def step(self, version: Version) -> StepReport:
        """Divide by the global denominator and step: version → version + 1."""
        with self._spans("wait/ranks"):
            every = self._backend.exchange(
                [self._counts.tokens, self._counts.rollouts, self._metrics.to_wire()]
            )
        denominator = self._objective.denominator(Counts.total(Counts(t, r) for t, r, _ in every))
        merged = Metrics()
        merged.merge(Metrics.from_wire(metrics) for _, _, metrics in every)
        values = with_ratio_summary(merged.values())
        values["loss"] = values.get("loss", 0.0) / denominator
        # A clamp turns the gradient of a NaN into 0: the loss must be finite too, or the step is refused.
        scale = 1 / denominator if math.isfinite(values["loss"]) else math.nan
        lr = learning_rate(version, self._config.run.versions, self._config.learner.optimizer)
        with self._spans("compute/optimizer"):
            norm = self._backend.optimizer_step(scale, lr)
        self._reset()
        return StepReport(norm, lr, values)

    def abandon(self) -> None:
        """Forget what this version has accumulated."""
        self._backend.forget_gradients()
        self._reset()

    def _prepare(self, groups: Sequence[Group], version: Version) -> list[MicroBatch]:
        batch = MicroBatch.of(groups)
        batch = batch.with_advantages(advantages(batch, self._config.algorithm))
        self._counts = Counts.total([self._counts, Counts.of(batch)])
        moving = moving_rollouts(batch)
        self._metrics.merge([batch_metrics(batch, version)])
        flat = len(groups) - len({int(batch.group_R[r]) for r in moving})
        self._metrics.add("share/flat_groups", Mean(flat, len(groups)))
        rollouts = moving if self._skip_flat else range(batch.rollouts)
        return pack(batch, rollouts, self._config.learner.micro_batch_tokens)

    def _reset(self) -> None:
        self._counts, self._metrics = Counts(), Metrics()
