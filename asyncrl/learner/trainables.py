"""Every model that learns, with what it learns by.

    policy                 PolicyObjective     from version critic.warmup_versions on
    critic, cost_critic    ValueObjective      from the first version
    reward_model           OutcomeObjective    from the first version

All of them train in the same optimizer steps, each with a denominator, an optimizer and a schedule of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from asyncrl.config.schema import Config, OptimizerConfig
from asyncrl.learner.algorithms.aggregation import Counts
from asyncrl.learner.backend import POLICY, Backend
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.objective import PolicyObjective
from asyncrl.learner.outcome_objective import OutcomeObjective
from asyncrl.learner.requirements import first_policy_version, norm_tokens, steps_per_version
from asyncrl.learner.schedule import learning_rate
from asyncrl.learner.value_objective import ValueObjective
from asyncrl.telemetry.metrics import Metrics
from asyncrl.types import Version

CRITIC, COST_CRITIC, REWARD_MODEL = "critic", "cost_critic", "reward_model"


class LearningModel(Protocol):
    """The part of `Model` that training needs; the backend itself is the policy's."""

    def forward(self, batch: MicroBatch) -> tuple[MicroBatch, *tuple[Tensor, ...]]: ...

    def backward(self, loss: Tensor) -> None: ...

    def gradient_norm(self, scale: float) -> float: ...

    def optimizer_step(self, scale: float, lr: float) -> float: ...

    def forget_gradients(self) -> None: ...


class Objective(Protocol):
    """(batch, what the model says of it, version=) → (a sum to differentiate, metrics). The sum over the global batch
    is divided by the `denominator` of what it counts there."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Metrics]: ...

    def counts(self, batch: MicroBatch) -> Counts: ...

    def denominator(self, counts: Counts) -> float: ...


@dataclass(frozen=True, slots=True)
class Trainable:
    """since: the first version it learns from · skips_flat: its loss is exactly 0 on groups without an advantage"""

    name: str
    model: LearningModel
    objective: Objective
    optimizer: OptimizerConfig
    since: Version = 0
    skips_flat: bool = False

    def lr(self, version: Version, number: int, config: Config) -> float:
        """Of optimizer step `number` of `version`. The schedule runs over all steps of this model in the run."""
        per_version = steps_per_version(config)
        step = (version - self.since) * per_version + number
        steps = (config.run.versions - self.since) * per_version
        return learning_rate(step, steps, self.optimizer)


def trainables(backend: Backend, config: Config) -> list[Trainable]:
    """The policy, and those of the backend's models that learn."""
    objective = PolicyObjective(config.algorithm, norm_tokens(config))
    found = [
        Trainable(
            POLICY,
            backend,
            objective,
            config.learner.optimizer,
            since=first_policy_version(config),
            skips_flat=config.learner.skip_flat_groups and objective.skips_flat_groups,
        )
    ]
    for name, prefix in ((CRITIC, ""), (COST_CRITIC, "cost_")):
        if name in backend.models:
            values = ValueObjective(name, f"{prefix}values", f"{prefix}returns", config.critic.clip)
            found.append(Trainable(name, backend.models[name], values, config.critic.optimizer))
    if REWARD_MODEL in backend.models:
        outcome = OutcomeObjective(config.algorithm.prm_beta)
        found.append(
            Trainable(REWARD_MODEL, backend.models[REWARD_MODEL], outcome, config.reward_model.optimizer)
        )
    return found
