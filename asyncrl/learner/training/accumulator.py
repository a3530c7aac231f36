"""Sums of gradients of every model that learns, and the one optimizer step that they make.

    batch ─▸ pack ─▸ forward ─▸ objective ─▸ backward ─┐  for the policy, and for the critics and the reward model
      ▲              └───── here, or on a pool ──────┘ │
      └───── the next batch ◂──────────────────────────┤  sums of gradients, counts, losses, metrics
                                                       └─▸ · 1 / denominator ─▸ optimizer step

All ranks make as many passes as the one that needs most; each spreads its rollouts over them so that all passes cost
about the same. Groups with values that are not finite are found before anything moves (`finite_check.py`).

A batch is whole groups, with advantages and whatever columns the objectives ask for. Nothing here knows how many
batches make a step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.learner.algorithms.losses.aggregation import Counts
from asyncrl.learner.backends.backend import Backend, exchange_per_data_rank
from asyncrl.learner.checks.behaviour import BehaviourGate, Gap
from asyncrl.learner.checks.finite_check import NotFinite
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.packing import bins, moving_rollouts, pack
from asyncrl.learner.models.roles import POLICY
from asyncrl.learner.reporting.flops import even_tokens, squares
from asyncrl.learner.reporting.utilization import PASSED, PASSED_SQUARES
from asyncrl.learner.training.passes import LearningModel, Look
from asyncrl.learner.training.trainables import Trainable, trainables
from asyncrl.telemetry.metrics import Metrics, Sum
from asyncrl.telemetry.spans import Spans
from asyncrl.types import Version


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One optimizer step over all ranks, by model: the mean loss, the learning rate, and the gradient's norm before
    clipping, NaN where the loss is not finite. If one of the norms is not finite no model has moved.

    gap: between recorded and recomputed log-probs of tokens made by the version itself · metrics: of this rank's passes
    """

    losses: Mapping[str, float]
    rates: Mapping[str, float]
    norms: Mapping[str, float]
    gap: Gap
    metrics: Metrics

    @property
    def refused(self) -> list[str]:
        """The models that kept all of them from moving."""
        return [name for name, norm in self.norms.items() if not math.isfinite(norm)]


class Accumulator:
    """The same calls on every rank, in the same order, whatever rollouts each of them holds.

    gate: compares the policy's log-probs with the recorded ones before a version's first step; none: nobody does
    pooled: models that learn on pools
    """

    def __init__(
        self,
        backend: Backend,
        config: Config,
        spans: Spans | None = None,
        gate: BehaviourGate | None = None,
        pooled: Mapping[str, LearningModel] | None = None,
    ) -> None:
        self._backend, self._config, self._gate = backend, config, gate
        self._moved: Version | None = None  # the last version with a step
        self._gap = Gap()
        self._spans = spans or Spans()
        # First what pools do while this process is busy with the rest.
        self._trainables = sorted(trainables(backend, config, pooled), key=lambda each: not each.on_pool)
        self._max_tokens, self._even_tokens = config.learner.micro_batch_tokens, even_tokens(config.model)
        self._reset()

    def add(self, batch: MicroBatch | None, version: Version, number: int = 0) -> None:
        """∀ Add the gradient of a batch, none where this rank has no groups.

        Raises NotFinite as `step` does, for batches added before this one.
        """
        learning = self._learning(version)
        with self._spans("compute/pack"):
            if batch is not None:
                for each in learning:
                    so_far = self._counts[each.name]
                    self._counts[each.name] = Counts.total([so_far, each.objective.counts(batch)])
            counting = [self._counting(trainable, batch) for trainable in learning]
            needed = [len(bins(batch, some, self._max_tokens)) if batch else 0 for some in counting]
        with self._spans("wait/ranks"):
            every = self._backend.exchange([needed, sorted(self._bad)])
        self._require_sound((bad for _, bad in every), number)
        for trainable, rollouts, *passes in zip(learning, counting, *(n for n, _ in every), strict=True):
            with self._spans("compute/pack"):
                micro_batches = self._packed(batch, rollouts, max(passes))
                if trainable.name == POLICY and batch is not None:
                    self._metrics.merge([_passed(micro_batches)])
            with self._spans("compute/forward_backward"):
                look = self._look(version) if trainable.name == POLICY else None
                trainable.model.learn(trainable.objective, micro_batches, max(passes), version, look)
            self._note_found(trainable, wait=False)

    def _note_found(self, trainable: Trainable, wait: bool) -> None:
        found = trainable.model.found(wait)
        self._losses[trainable.name] += found.loss
        self._bad |= found.bad
        self._metrics.merge([found.metrics])

    def step(self, version: Version, number: int = 0) -> OptimizerStep:
        """∀ Divide by the global denominators and step, for the `number`-th time in `version`: all models or none.

        Raises BehaviourMismatchError, and NotFinite where it is the version's first step: nothing has moved then. In
        later steps what is not finite shows in the loss, and the step is refused.
        """
        learning = self._learning(version)
        for trainable in learning:
            with self._spans(_doing(trainable)):
                self._note_found(trainable, wait=True)
        scales, losses, gap = self._scales_and_losses(learning, number)
        if self._gate is not None:
            self._gate.judge(gap, version)
        self._moved = version
        rates = {t.name: t.lr(version, number, self._config) for t in learning}
        with self._spans("compute/optimizer"):
            norms = {t.name: self._norm(t, scales[t.name], losses[t.name]) for t in learning}
            step = OptimizerStep(losses, rates, norms, gap, self._metrics)
            if not step.refused:
                for t in learning:
                    with self._spans(_doing(t)):
                        t.model.optimizer_step(scales[t.name], rates[t.name])
        self.abandon()
        return step

    def abandon(self) -> None:
        """Forget what has been summed up."""
        for trainable in self._trainables:
            trainable.model.forget_gradients()
        self._reset()

    def _norm(self, trainable: Trainable, scale: float, loss: float) -> float:
        """∀ A clamp turns the gradient of a NaN into 0, so the loss is looked at too."""
        with self._spans(_doing(trainable)):
            return trainable.model.gradient_norm(scale if math.isfinite(loss) else math.nan)

    def _look(self, version: Version) -> Look | None:
        """Where the policy of the version's start is known: by the column `proximal`, or because it has not moved."""
        gate, moved = self._gate, self._moved == version
        if gate is None:
            return None

        def compare(batch: MicroBatch, logp_N: Tensor) -> None:
            if not moved or "proximal" in batch.columns:
                start_N = batch.columns.get("proximal", logp_N.detach())
                self._gap = Gap.of([self._gap, gate.gap(batch, start_N, version)])

        return compare

    def _scales_and_losses(
        self, learning: Sequence[Trainable], number: int
    ) -> tuple[dict[str, float], dict[str, float], Gap]:
        """∀ By model: 1 / the global denominator, and the mean loss; and the gap of the version's own tokens."""
        counted = {name: astuple(counts) for name, counts in self._counts.items()}
        with self._spans("wait/ranks"):
            told = [counted, self._losses, astuple(self._gap), sorted(self._bad)]
            every = exchange_per_data_rank(self._backend, told)
        self._require_sound((bad for *_, bad in every), number)
        scales, losses = {}, {}
        for t in learning:
            counts = Counts.total(Counts(*theirs[t.name]) for theirs, *_ in every if t.name in theirs)
            scales[t.name] = 1 / t.objective.denominator(counts)
            losses[t.name] = scales[t.name] * sum(mine.get(t.name, 0.0) for _, mine, *_ in every)
        return scales, losses, Gap.of(Gap(*gap) for _, _, gap, _ in every)

    def _require_sound(self, bad: Iterable[Sequence[int]], number: int) -> None:
        """bad: what each rank has found. Once a version has moved it cannot be begun anew."""
        ordinals = {ordinal for theirs in bad for ordinal in theirs}
        if ordinals and number == 0:
            raise NotFinite(ordinals)

    def _learning(self, version: Version) -> list[Trainable]:
        return [trainable for trainable in self._trainables if version >= trainable.since]

    def _counting(self, trainable: Trainable, batch: MicroBatch | None) -> list[int]:
        """The rollouts without those that are sure to add nothing to the gradient."""
        if batch is None:
            return []
        rollouts = moving_rollouts(batch) if trainable.skips_flat else range(batch.rollouts)
        copies = batch.copies_R.tolist()
        return [r for r in rollouts if copies[r] > 0]

    def _packed(self, batch: MicroBatch | None, rollouts: Sequence[int], passes: int) -> list[MicroBatch]:
        if batch is None:
            return []
        return pack(batch, rollouts, self._max_tokens, passes, self._even_tokens)

    def _reset(self) -> None:
        self._counts = defaultdict[str, Counts](Counts)
        self._losses = defaultdict[str, float](float)
        self._gap = Gap()
        self._bad = set[int]()
        self._metrics = Metrics()


def _doing(trainable: Trainable) -> str:
    """The span of its steps."""
    return "wait/pool" if trainable.on_pool else "compute/optimizer"


def _passed(micro_batches: Sequence[MicroBatch]) -> Metrics:
    """What the policy is trained on in these, for `Utilization`."""
    metrics = Metrics()
    metrics.add(PASSED, Sum(sum(batch.tokens for batch in micro_batches)))
    metrics.add(PASSED_SQUARES, Sum(sum(squares(batch.lengths_R) for batch in micro_batches)))
    return metrics
