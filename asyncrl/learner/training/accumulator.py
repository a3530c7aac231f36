"""The gradients of every model that learns, summed over batches, and the optimizer step from them.

    batch ─▸ pack ─▸ forward ─▸ objective ─▸ backward ─┐  for the policy, and for the critics and the reward model
      ▲              └── here, or in a pool ─────────┘ │
      └───── the next batch ◂──────────────────────────┤  sums of gradients, counts, losses, metrics
                                                       └─▸ · 1 / denominator ─▸ optimizer step

Every rank runs the same number of passes, the maximum over ranks; each spreads its rollouts over them so that all
passes cost about the same. Where the objective permits, the segments of a rollout may go into different passes. Groups
with values that are not finite are found before anything moves (`finite_check.py`).

A batch is whole groups, with advantages and the columns that the objectives read. Any number of batches make a step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.learner.algorithms.losses.aggregation import Counts
from asyncrl.learner.algorithms.roles import POLICY, learning
from asyncrl.learner.backends.backend import Backend, exchange_per_data_rank
from asyncrl.learner.checks.finite_check import NonFiniteGroups
from asyncrl.learner.checks.logprob_check import LogprobGap, LogprobGate
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.packing import bins, moving_rollouts, pack_micro_batches
from asyncrl.learner.data.shared_prompts import repeated_lengths
from asyncrl.learner.models.networks import blueprint, counts_prompts_once
from asyncrl.learner.reporting.utilization import PASSED, PASSED_SQUARES, even_tokens, squares
from asyncrl.learner.training.objectives import PolicyObjective, auxiliary_objective
from asyncrl.learner.training.passes import Inspect, LearningModel, LocalModel, Objective, PassResult
from asyncrl.learner.training.requirements import first_policy_version, norm_tokens, steps_per_version
from asyncrl.telemetry.metrics import Metrics, Sum
from asyncrl.telemetry.spans import Spans
from asyncrl.types import Version


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One optimizer step over all ranks; the mappings are by model.

    losses   means over the global batch
    rates    learning rates
    norms    of the gradients before clipping, NaN where the loss is not finite; if one is not finite no model has moved
    gap      between recorded and recomputed log-probs of tokens that the version itself made
    metrics  of this rank's passes
    """

    losses: Mapping[str, float]
    rates: Mapping[str, float]
    norms: Mapping[str, float]
    gap: LogprobGap
    metrics: Metrics

    @property
    def refused(self) -> list[str]:
        """The models whose gradients are not finite."""
        return [name for name, norm in self.norms.items() if not math.isfinite(norm)]


@dataclass(frozen=True, slots=True)
class Trainable:
    """A model that learns, with its objective, its optimizer settings and its learning rate.

        policy                 PolicyObjective     from version critic.warmup_versions on
        critics                ValueObjective      from the first version
        reward_model           OutcomeObjective    from the first version, unless it is frozen

    All of them train in the same optimizer steps, each with its own denominator, optimizer and schedule.

    since       the first version that it learns from
    skips_flat  whether its loss is exactly 0 on groups without an advantage
    in_pool     whether its passes and steps run in a pool
    """

    name: str
    model: LearningModel
    objective: Objective
    optimizer: OptimizerConfig
    since: Version = 0
    skips_flat: bool = False
    in_pool: bool = False

    def lr(self, version: Version, number: int, config: Config) -> float:
        """The rate of optimizer step `number` of `version`. The schedule covers all steps of this model in the run."""
        per_version = steps_per_version(config)
        step = (version - self.since) * per_version + number
        steps = (config.run.versions - self.since) * per_version
        return learning_rate(step, steps, self.optimizer)


def unnoticed() -> None:
    """For `Accumulator.add`."""


class Accumulator:
    """Collective: every method, also on ranks without rollouts.

    gate: compares the policy's log-probs with the recorded ones before a version's first step, if given.
    remote_models: models that learn in pools. learning: the models that learn; None: those of the algorithm.
    """

    def __init__(
        self,
        backend: Backend,
        config: Config,
        spans: Spans | None = None,
        gate: LogprobGate | None = None,
        remote_models: Mapping[str, LearningModel] | None = None,
        learning: Sequence[Trainable] | None = None,
    ) -> None:
        self._backend, self._config, self._gate = backend, config, gate
        self._moved: Version | None = None  # the last version with a step
        self._spans = spans or Spans()
        # Models in pools first: they compute while this process is busy with the others.
        found = trainables(backend, config, remote_models or {}) if learning is None else learning
        self._trainables = sorted(found, key=lambda each: not each.in_pool)
        self._max_tokens, self._even_tokens = config.learner.micro_batch_tokens, even_tokens(config.model)
        self._shares = counts_prompts_once(POLICY, config)
        self._reset()

    def _reset(self) -> None:
        self._counts = defaultdict[str, Counts](Counts)
        self._losses = defaultdict[str, float](float)
        self._gap = LogprobGap()
        self._bad = set[int]()
        self._metrics = Metrics()

    def add(
        self,
        batch: MicroBatch | None,
        version: Version,
        number: int = 0,
        begun: Callable[[], None] = unnoticed,
    ) -> None:
        """Add the gradient of a batch, None where this rank has no groups. Raises NonFiniteGroups as `step`, for
        batches added before this one. begun: called when the passes begin"""
        learning = self._learning(version)
        with self._spans("compute/pack"):
            if batch is not None:
                for each in learning:
                    self._counts[each.name] += each.objective.counts(batch)
            divided = [batch and each.objective.divided(batch) for each in learning]
            counting = [self._counting(each, some) for each, some in zip(learning, divided, strict=True)]
            needed = [
                len(bins(some, rollouts, self._max_tokens, self._shares)) if some else 0
                for some, rollouts in zip(divided, counting, strict=True)
            ]
        with self._spans("wait/ranks"):
            every = self._backend.exchange([needed, sorted(self._bad)])
        self._require_finite((bad for _, bad in every), number)
        begun()
        for trainable, some, rollouts, *passes in zip(
            learning, divided, counting, *(n for n, _ in every), strict=True
        ):
            micro_batches: list[MicroBatch] = []
            if some is not None:
                with self._spans("compute/pack"):
                    micro_batches = pack_micro_batches(
                        some, rollouts, self._max_tokens, max(passes), self._even_tokens, self._shares
                    )
            with self._spans("compute/forward_backward"):
                inspect = self._inspect(version) if trainable.name == POLICY else None
                trainable.model.learn(trainable.objective, micro_batches, max(passes), version, inspect)
            if trainable.name == POLICY and some is not None:
                self._metrics.merge([_passed(micro_batches, self._shares)])
            self._metrics.merge([self._take_results(trainable, wait=False).metrics()])

    def _take_results(self, trainable: Trainable, wait: bool) -> PassResult:
        results = trainable.model.take_results(wait)
        self._losses[trainable.name] += results.loss
        self._bad |= results.bad
        return results

    def step(self, version: Version, number: int = 0) -> OptimizerStep:
        """Divide by the global denominators and step, for the `number`-th time in `version`: all models or none.

        Raises:
            BehaviourMismatchError: See `LogprobGate`.
            NonFiniteGroups: In the version's first step, before anything has moved. In later steps values that are not
                finite show in the loss, and the step is refused.
        """
        learning, last = self._learning(version), list[PassResult]()
        for trainable in learning:
            with self._spans(_step_span(trainable)):
                last.append(self._take_results(trainable, wait=True))
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
                    with self._spans(_step_span(t)):
                        t.model.optimizer_step(scales[t.name], rates[t.name])
            self._metrics.merge(results.metrics() for results in last)  # while a device makes the step
        self.abandon()
        return step

    def abandon(self) -> None:
        """Drop the sums."""
        for trainable in self._trainables:
            trainable.model.forget_gradients()
        self._reset()

    def _norm(self, trainable: Trainable, scale: float, loss: float) -> float:
        """The gradient's norm; NaN for a loss that is not finite, as a clamp turns the gradient of a NaN into 0."""
        with self._spans(_step_span(trainable)):
            return trainable.model.gradient_norm(scale if math.isfinite(loss) else math.nan)

    def _inspect(self, version: Version) -> Inspect | None:
        """Measures the log-prob gap if the log-probs at the version's start are known: from the column `proximal`, or
        because no optimizer step of this version has run yet."""
        gate, moved = self._gate, self._moved == version
        if gate is None:
            return None

        def compare(batch: MicroBatch, logp_N: Tensor) -> None:
            if not moved or "proximal" in batch.columns:
                start_N = batch.columns.get("proximal", logp_N.detach())
                self._gap = LogprobGap.of([self._gap, gate.gap(batch, start_N, version)])

        return compare

    def _scales_and_losses(
        self, learning: Sequence[Trainable], number: int
    ) -> tuple[dict[str, float], dict[str, float], LogprobGap]:
        """By model: 1 / the global denominator, and the mean loss; and the gap of the version's own tokens."""
        counted = {name: astuple(counts) for name, counts in self._counts.items()}
        with self._spans("wait/ranks"):
            mine = [counted, self._losses, astuple(self._gap), sorted(self._bad)]
            every = exchange_per_data_rank(self._backend, mine)
        self._require_finite((bad for *_, bad in every), number)
        scales, losses = {}, {}
        for t in learning:
            counts = sum((Counts(*theirs[t.name]) for theirs, *_ in every if t.name in theirs), Counts())
            scales[t.name] = 1 / t.objective.denominator(counts)
            losses[t.name] = scales[t.name] * sum(sums.get(t.name, 0.0) for _, sums, *_ in every)
        return scales, losses, LogprobGap.of(LogprobGap(*gap) for _, _, gap, _ in every)

    def _require_finite(self, bad: Iterable[Sequence[int]], number: int) -> None:
        """Raise NonFiniteGroups for the bad groups of all ranks, unless the version has moved already."""
        ordinals = {ordinal for theirs in bad for ordinal in theirs}
        if ordinals and number == 0:
            raise NonFiniteGroups(ordinals)

    def _learning(self, version: Version) -> list[Trainable]:
        return [trainable for trainable in self._trainables if version >= trainable.since]

    def _counting(self, trainable: Trainable, batch: MicroBatch | None) -> list[int]:
        """The rollouts that may add to the gradient."""
        if batch is None:
            return []
        rollouts = moving_rollouts(batch) if trainable.skips_flat else range(batch.rollouts)
        copies = batch.copies_R.tolist()
        return [r for r in rollouts if copies[r] > 0]


def _step_span(trainable: Trainable) -> str:
    """The span of the model's steps."""
    return "wait/pool" if trainable.in_pool else "compute/optimizer"


def _passed(micro_batches: Sequence[MicroBatch], shares: bool) -> Metrics:
    """The tokens of these passes of the policy, for `Utilization`: those of shared prompts once."""
    tokens = pairs = 0
    for batch in micro_batches:
        repeated = repeated_lengths(batch) if shares else []
        tokens += batch.tokens - sum(repeated)
        pairs += squares(batch.segment_lengths) - squares(repeated)
    metrics = Metrics()
    metrics.add(PASSED, Sum(tokens))
    metrics.add(PASSED_SQUARES, Sum(pairs))
    return metrics


def trainables(
    backend: Backend, config: Config, remote_models: Mapping[str, LearningModel]
) -> list[Trainable]:
    """The policy, and the models beside it that learn, in this process or in pools."""
    objective = PolicyObjective(config.algorithm, norm_tokens(config))
    found = [
        Trainable(
            POLICY,
            LocalModel(backend.policy),
            objective,
            config.learner.optimizer,
            since=first_policy_version(config),
            skips_flat=config.learner.skip_flat_groups and objective.skips_flat_groups,
        )
    ]
    own: Mapping[str, LearningModel] = {name: LocalModel(model) for name, model in backend.models.items()}
    every = {**own, **remote_models}
    for name in learning():
        if name in every and (optimizer := blueprint(name, config).optimizer) is not None:
            made = auxiliary_objective(name, config)
            found.append(Trainable(name, every[name], made, optimizer, in_pool=name not in own))
    return found


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warm-up from lr / warmup_steps, then the schedule,
    which reaches lr · min_lr_ratio at the last step.

    >>> config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="linear", min_lr_ratio=0.0)
    >>> [learning_rate(k, 6, config) for k in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    peak = max(0, config.warmup_steps - 1)
    progress = min(1.0, (step - peak) / max(1, steps - 1 - peak))
    remaining = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)
