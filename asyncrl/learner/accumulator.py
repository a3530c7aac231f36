"""Sums of gradients of every model that learns, and the one optimizer step that they make.

    batch ─▸ pack ─▸ forward ─▸ objective ─▸ backward ─┐  for the policy, and for the critics and the reward model
      ▲                                                │
      └───── the next batch ◂──────────────────────────┤  sums of gradients, counts, losses, metrics
                                                       └─▸ · 1 / denominator ─▸ optimizer step

A batch is whole groups, with advantages and whatever columns the objectives ask for. Nothing here knows how many
batches make a step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.learner.algorithms.aggregation import Counts
from asyncrl.learner.backend import POLICY, Backend
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.behaviour import BehaviourGate, Gap
from asyncrl.learner.packing import moving_rollouts, pack
from asyncrl.learner.trainables import Trainable, trainables
from asyncrl.telemetry.metrics import Metrics
from asyncrl.telemetry.spans import Spans
from asyncrl.types import Version

NOBODY = MicroBatch.empty().with_columns(weight=torch.zeros(1), selected=torch.zeros(1, dtype=torch.bool))
"""What a rank runs while another has rollouts left. Nothing of a whole batch is picked from it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step over all ranks, by model: the mean loss, the learning rate, and the gradient's norm before
    clipping, NaN where the loss is not finite. If one of the norms is not finite no model has moved.

    gap: between recorded and recomputed log-probs of tokens made by the version itself
    """

    losses: Mapping[str, float]
    rates: Mapping[str, float]
    norms: Mapping[str, float]
    gap: Gap

    @property
    def refused(self) -> list[str]:
        """The models that kept all of them from moving."""
        return [name for name, norm in self.norms.items() if not math.isfinite(norm)]


class Accumulator:
    """The same calls on every rank, in the same order, whatever rollouts each of them holds.

    gate: compares the policy's log-probs with the recorded ones before a version's first step; none: nobody does
    """

    def __init__(
        self,
        backend: Backend,
        config: Config,
        spans: Spans | None = None,
        gate: BehaviourGate | None = None,
    ) -> None:
        self._backend, self._config, self._gate = backend, config, gate
        self._moved: Version | None = None  # the last version with a step
        self._gap = Gap()
        self._spans = spans or Spans()
        self._trainables = trainables(backend, config)
        self._reset()

    def add(self, batch: MicroBatch | None, version: Version) -> Metrics:
        """∀ Add the gradient of a batch, none where this rank has no groups. Returns what its passes measured."""
        learning = self._learning(version)
        with self._spans("compute/pack"):
            if batch is not None:
                for each in learning:
                    so_far = self._counts[each.name]
                    self._counts[each.name] = Counts.total([so_far, each.objective.counts(batch)])
            packed = [self._packed(trainable, batch) for trainable in learning]
        with self._spans("wait/ranks"):
            every = self._backend.exchange([len(micro_batches) for micro_batches in packed])
        metrics = Metrics()
        for trainable, micro_batches, *passes in zip(learning, packed, *every, strict=True):
            for turn in range(max(passes)):
                here = micro_batches[turn] if turn < len(micro_batches) else NOBODY
                with self._spans("compute/forward_backward"):
                    said = trainable.model.forward(here)
                    if trainable.name == POLICY:
                        self._compare(said[0], said[1], version)
                    loss, measured = trainable.objective(*said, version=version)
                    trainable.model.backward(loss)
                self._losses[trainable.name] += float(loss.detach())
                metrics.merge([measured])
        return metrics

    def step(self, version: Version, number: int = 0) -> Step:
        """∀ Divide by the global denominators and step, for the `number`-th time in `version`: all models or none.

        Raises BehaviourMismatchError, and has not moved anything then.
        """
        learning = self._learning(version)
        scales, losses, gap = self._scales_and_losses(learning)
        if self._gate is not None:
            self._gate.judge(gap, version)
        self._moved = version
        rates = {t.name: t.lr(version, number, self._config) for t in learning}
        with self._spans("compute/optimizer"):
            # A clamp turns the gradient of a NaN into 0, so the loss is looked at too.
            norms = {
                t.name: t.model.gradient_norm(scales[t.name] if math.isfinite(losses[t.name]) else math.nan)
                for t in learning
            }
            step = Step(losses, rates, norms, gap)
            if not step.refused:
                for t in learning:
                    t.model.optimizer_step(scales[t.name], rates[t.name])
        self.abandon()
        return step

    def abandon(self) -> None:
        """Forget what has been summed up."""
        for trainable in self._trainables:
            trainable.model.forget_gradients()
        self._reset()

    def _compare(self, batch: MicroBatch, logp_N: Tensor, version: Version) -> None:
        """Where the policy of the version's start is known: by the column `proximal`, or because it has not moved."""
        if self._gate is None or (self._moved == version and "proximal" not in batch.columns):
            return
        start_N = batch.columns.get("proximal", logp_N.detach())
        self._gap = Gap.of([self._gap, self._gate.gap(batch, start_N, version)])

    def _scales_and_losses(
        self, learning: Sequence[Trainable]
    ) -> tuple[dict[str, float], dict[str, float], Gap]:
        """∀ By model: 1 / the global denominator, and the mean loss; and the gap of the version's own tokens."""
        counted = {name: astuple(counts) for name, counts in self._counts.items()}
        with self._spans("wait/ranks"):
            every = self._backend.exchange([counted, self._losses, astuple(self._gap)])
        scales, losses = {}, {}
        for t in learning:
            counts = Counts.total(Counts(*theirs[t.name]) for theirs, _, _ in every if t.name in theirs)
            scales[t.name] = 1 / t.objective.denominator(counts)
            losses[t.name] = scales[t.name] * sum(mine.get(t.name, 0.0) for _, mine, _ in every)
        return scales, losses, Gap.of(Gap(*gap) for _, _, gap in every)

    def _learning(self, version: Version) -> list[Trainable]:
        return [trainable for trainable in self._trainables if version >= trainable.since]

    def _packed(self, trainable: Trainable, batch: MicroBatch | None) -> list[MicroBatch]:
        """Without the rollouts that are sure to add nothing to the gradient."""
        if batch is None:
            return []
        rollouts = moving_rollouts(batch) if trainable.skips_flat else range(batch.rollouts)
        copies = batch.copies_R.tolist()
        counting = [r for r in rollouts if copies[r] > 0]
        return pack(batch, counting, self._config.learner.micro_batch_tokens)

    def _reset(self) -> None:
        self._counts = defaultdict[str, Counts](Counts)
        self._losses = defaultdict[str, float](float)
        self._gap = Gap()
