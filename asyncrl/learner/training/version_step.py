"""The groups of one version become optimizer steps, in one of two ways. If an algorithm permits both, they give the
same result.

    streaming      claim ─▸ pack ─▸ score ─▸ ready ─▸ accumulate ──┐
                     ▲                                             ├─▸ optimizer step
                     └──────────── the next claim ◂────────────────┘

    whole batch    claim ─▸ pack ─▸ score ──┐                ┌─▸ mini-batch ─▸ accumulate ─▸ optimizer step ─┐
                     ▲                      ├─▸ ready, once ─┤                                               │
                     └──── next claim ◂─────┘                └──────── the next one, epoch after epoch ◂─────┘

Algorithms with statistics over the version's groups, and several optimizer steps, need the second way; there only the
other models' passes run while claims still come in. Groups may come from anywhere: a plain loop over lists trains
exactly like the stream.

Another thread may prepare a claim while the one before is computed: pack it, and in the first way make it ready, where
`Experience.ready_alone`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.counter_rng import uniform
from asyncrl.errors import TrainingError
from asyncrl.learner.algorithms.roles import POLICY
from asyncrl.learner.backends.backend import Backend, exchange_per_data_rank
from asyncrl.learner.checks.finite_check import NonFiniteGroups, nonfinite_inputs
from asyncrl.learner.checks.logprob_check import LogprobGap, LogprobGate
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.reporting.batch_metrics import batch_metrics, end_metrics, ready_metrics, version_values
from asyncrl.learner.training import requirements
from asyncrl.learner.training.accumulator import Accumulator, OptimizerStep, unnoticed
from asyncrl.learner.training.experience import AdaptiveCoefficients, Experience
from asyncrl.learner.training.passes import LearningModel
from asyncrl.telemetry.metrics import Metrics
from asyncrl.telemetry.spans import Spans
from asyncrl.types import WITHOUT_STEPS, Array, Group, Version

RemoteModels = Mapping[str, LearningModel]


@dataclass(frozen=True, slots=True)
class VersionReport:
    """The result of training on one version's groups, over all ranks.

    values   every metric; losses, gradient norms and learning rates are means over the optimizer steps
    refused  why the last of these steps was not made; empty if it was
    """

    values: Mapping[str, float]
    refused: str = ""


@dataclass(frozen=True, slots=True)
class PreparedClaim:
    """The groups of one claim, packed.

    ready    whether `Experience.ready` was called
    bad      ordinals of the groups that came with a number that is not finite
    metrics  of these groups, of their advantages too if they are ready
    """

    batch: MicroBatch
    ready: bool
    bad: set[int]
    metrics: Metrics


class VersionStep(ABC):
    """One version after the other: `add` each claim, then `step` or `abandon`.

    Collective: every method but `prepare`, also on ranks without groups.

    remote_models  models that learn in pools
    gated          whether `learner.logprob_gate` is asked
    """

    def __init__(
        self,
        backend: Backend,
        config: Config,
        spans: Spans | None = None,
        remote_models: RemoteModels | None = None,
        gated: bool = True,
    ) -> None:
        spans = spans or Spans()
        self._backend, self._config = backend, config
        self._experience = Experience(backend, config, spans)
        self.gate = LogprobGate(config) if gated and config.generator.makes_real_tokens else None
        self._accumulator = Accumulator(backend, config, spans, self.gate, remote_models)
        self._spans = spans
        self.controls = AdaptiveCoefficients.start(config.algorithm)
        self._begin()

    def prepare(self, groups: Sequence[Group], version: Version) -> PreparedClaim:
        """One claim's groups, at least one, for `add` to the same version. In any thread. Raises TrainingError as
        `Experience.ready` does."""
        batch = MicroBatch.of(groups)
        metrics = Metrics.of([end_metrics(groups), batch_metrics(batch, version)])
        return PreparedClaim(batch, False, nonfinite_inputs(batch), metrics)

    def add(
        self,
        groups: Sequence[Group],
        version: Version,
        prepared: PreparedClaim | None = None,
        begun: Callable[[], None] = unnoticed,
    ) -> None:
        """Take one claim's groups, to train the policy of `version`. Raises NonFiniteGroups as `step` does.

        prepared: the same groups, where that is done already · begun: called, once or more, when passes begin.
        """
        if prepared is None and groups:
            with self._spans("compute/pack"):
                prepared = self.prepare(groups, version)
        self._take(prepared, version, begun)
        # Behind the passes: a device has its work by now.
        for group in groups:
            self._columns |= group.columns.keys() & WITHOUT_STEPS.keys()
            self._parts |= set(group.reward_parts)
            self._ordinals.append(group.task.ordinal)
        if prepared is not None:
            self._bad |= prepared.bad
            self._metrics.merge([prepared.metrics])

    @abstractmethod
    def _take(self, claim: PreparedClaim | None, version: Version, begun: Callable[[], None]) -> None:
        """Take the groups of one claim, None where this rank has none."""

    def _score(self, claim: PreparedClaim | None, begun: Callable[[], None]) -> MicroBatch | None:
        """These groups with the outputs of other models."""
        batch = claim.batch if claim else None
        if not self._experience.predicts:
            return batch
        begun()
        scored = self._experience.score(batch)
        self._bad |= nonfinite_inputs(scored) if scored else set()
        return scored

    @abstractmethod
    def _train(self, version: Version) -> list[OptimizerStep]:
        """Make the optimizer steps of `version`, all its groups being in; the last one may be refused."""

    def step(self, version: Version) -> VersionReport:
        """Finish `version`: afterwards the policy is that of version + 1, unless the step was refused.

        Raises NonFiniteGroups on all ranks: `abandon` the version and begin it anew without these groups.
        """
        self._exchange_contents()
        steps = self._train(version)
        self._metrics.merge(step.metrics for step in steps)
        report = self._report(steps)
        if not report.refused:
            self._move_on(version, report)
        self._begin()
        return report

    def logprobs(self, groups: Sequence[Group]) -> list[Array]:
        """The policy's log-probs of each group's tokens as it is now, in their order; 0 where the mask is 0."""
        return self._experience.logprobs(groups)

    def abandon(self) -> None:
        """Drop the groups added since the last step."""
        self._accumulator.abandon()
        self._begin()

    def _begin(self) -> None:
        self._metrics = Metrics()
        self._columns, self._parts, self._ordinals = set[str](), set[str](), list[int]()
        self._bad = set[int]()

    def _exchange_contents(self) -> None:
        """Collect the columns and reward parts of all ranks' groups. Single groups may lack some that the algorithm
        needs; raises TrainingError if all of them do, and NonFiniteGroups."""
        mine = [sorted(self._columns), sorted(self._parts), self._ordinals, sorted(self._bad)]
        with self._spans("wait/ranks"):
            every = self._backend.exchange(mine)
        columns, parts, ordinals, bad = (
            [name for each in some for name in each] for some in zip(*every, strict=True)
        )
        if bad:
            raise NonFiniteGroups(set(bad))
        self._columns, self._parts = set(columns), set(parts)
        lacking = [f"column {name!r}" for name in requirements.columns(self._config) if name not in columns]
        lacking += [f"reward part {name!r}" for name in requirements.parts(self._config) if name not in parts]
        if lacking and ordinals:
            raise TrainingError(
                f"all groups of tasks {min(ordinals)} to {max(ordinals)} lack the {lacking[0]}, which the algorithm "
                "looks at: it comes from the reward function"
            )

    def _report(self, steps: Sequence[OptimizerStep]) -> VersionReport:
        with self._spans("wait/ranks"):
            every = exchange_per_data_rank(self._backend, self._metrics.to_wire())
        report = version_values(Metrics.of(map(Metrics.from_wire, every)))
        adapted = self.controls.adapted(self._config.algorithm)  # train/kl_coef, train/cost_multiplier
        report |= {f"train/{name}": value for name, value in adapted.items()}
        report |= LogprobGap.of(step.gap for step in steps).metrics("train")
        report["train/optimizer_steps"] = float(len(steps))
        for name in steps[-1].losses:  # train/loss, train/critic/loss, …
            prefix = "train/" if name == POLICY else f"train/{name}/"
            report[f"{prefix}loss"] = mean(step.losses[name] for step in steps)
            report[f"{prefix}grad_norm"] = mean(step.norms[name] for step in steps)
            report[f"{prefix}lr"] = mean(step.rates[name] for step in steps)
        refused = [f"gradient norm {steps[-1].norms[name]} of the {name}" for name in steps[-1].refused]
        where = f" in optimizer step {len(steps)}" if len(steps) > 1 else ""
        return VersionReport(report, ", ".join(refused) + where if refused else "")

    def _move_on(self, version: Version, report: VersionReport) -> None:
        if version >= requirements.first_policy_version(self._config):
            self.controls = self.controls.after(report.values, self._config.algorithm)
        every = self._config.reference.update_every
        if every and (version + 1) % every == 0 and "reference" in self._backend.models:
            self._backend.models["reference"].copy_from_policy()


class Streaming(VersionStep):
    """Every claim is trained on as it arrives; one optimizer step when the last one is in."""

    def prepare(self, groups: Sequence[Group], version: Version) -> PreparedClaim:
        claim = super().prepare(groups, version)
        if not self._experience.ready_alone:
            return claim
        batch, measured = self._ready(claim.batch, version)
        claim.metrics.merge([measured])
        return replace(claim, batch=batch, ready=True)

    def _take(self, claim: PreparedClaim | None, version: Version, begun: Callable[[], None]) -> None:
        batch, measured = claim.batch if claim else None, Metrics()
        if claim is None or not claim.ready:
            scored = self._score(claim, begun)
            if scored is not None:
                with self._spans("compute/pack"):
                    batch, measured = self._ready(scored, version)
        self._accumulator.add(batch, version, begun=begun)
        self._metrics.merge([measured])

    def _ready(self, scored: MicroBatch, version: Version) -> tuple[MicroBatch, Metrics]:
        scored = scored.completed(requirements.columns(self._config), requirements.parts(self._config))
        batch, metrics = self._experience.ready(scored, version, self.controls)
        metrics.merge([ready_metrics(batch)])
        return batch, metrics

    def _train(self, version: Version) -> list[OptimizerStep]:
        return [self._accumulator.step(version)]


class WholeBatch(VersionStep):
    """Claims are scored as they arrive; when the last one is in, the mini-batches are trained on one by one."""

    def _begin(self) -> None:
        super()._begin()
        self._claims: list[MicroBatch] = []

    def _take(self, claim: PreparedClaim | None, version: Version, begun: Callable[[], None]) -> None:
        scored = self._score(claim, begun)
        begun()
        if scored is not None:
            self._claims.append(scored)

    def _train(self, version: Version) -> list[OptimizerStep]:
        batch = self._ready(version)
        steps: list[OptimizerStep] = []
        for number, ordinals in enumerate(self._mini_batches(batch, version)):
            part = batch and batch.of_ordinals(ordinals)
            part = self._experience.for_step(part, version, moved=number > 0)
            self._accumulator.add(part, version, number)
            steps.append(self._accumulator.step(version, number))
            if steps[-1].refused:
                break
        return steps

    def _ready(self, version: Version) -> MicroBatch | None:
        """All groups of this rank, ready to train on. A rank without groups takes part in the exchanges alone."""
        mine = MicroBatch.joined(self._claims).completed(self._columns, self._parts) if self._claims else None
        self._claims.clear()
        with self._spans("compute/pack"):
            batch, metrics = self._experience.ready(mine or MicroBatch.empty(), version, self.controls)
        if mine is None:
            return None
        self._metrics.merge([metrics, ready_metrics(batch)])
        return batch

    def _mini_batches(self, batch: MicroBatch | None, version: Version) -> list[list[int]]:
        """Ordinals of each optimizer step, from all ranks' groups; the same on every rank."""
        mine = [] if batch is None else batch.ordinals_R.unique().tolist()
        with self._spans("wait/ranks"):
            every = exchange_per_data_rank(self._backend, mine)
        learner = self._config.learner
        ordinals = [ordinal for each in every for ordinal in each]
        return mini_batches(ordinals, learner.mini_batches, learner.epochs, self._config.run.seed, version)


def mini_batches(
    ordinals: Iterable[int], parts: int, epochs: int, seed: int, version: Version
) -> list[list[int]]:
    """The ordinals of each optimizer step of a version, epoch after epoch: `parts` slices an epoch, whose sizes differ
    by one at most. One slice an epoch keeps the order of the ordinals; fewer groups than `parts` make fewer slices.

        ordinals of all ranks    8 9 10 11 12 13          epochs = 2, parts = 3
        epoch 0                  [13 9] [11 12] [8 10]    drawn from (seed, version, epoch): the same on every rank and
        epoch 1                  [12 9] [13 11] [8 10]    for any number of ranks; each rank trains on its own of them

    >>> mini_batches([5, 3, 4], parts=1, epochs=2, seed=0, version=0)
    [[3, 4, 5], [3, 4, 5]]
    >>> [len(step) for step in mini_batches(range(7), parts=3, epochs=1, seed=0, version=0)]
    [3, 2, 2]
    """
    ordered = np.array(sorted(ordinals), np.int64)
    steps: list[list[int]] = []
    for epoch in range(epochs):
        drawn = ordered[np.argsort(uniform(seed, version, epoch, ordered))] if parts > 1 else ordered
        steps += [slice_.tolist() for slice_ in np.array_split(drawn, parts) if len(slice_)]
    return steps


def version_step(
    backend: Backend,
    config: Config,
    spans: Spans | None = None,
    remote_models: RemoteModels | None = None,
    gated: bool = True,
) -> VersionStep:
    """The version step that the configuration needs, see there."""
    chosen = WholeBatch if requirements.whole_batch(config) else Streaming
    return chosen(backend, config, spans, remote_models, gated)
