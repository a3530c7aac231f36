"""Every model that learns, with what it learns by.

    policy                 PolicyObjective     from version critic.warmup_versions on
    critic, cost_critic    ValueObjective      from the first version
    reward_model           OutcomeObjective    from the first version, unless it is frozen

All of them train in the same optimizer steps, each with a denominator, an optimizer and a schedule of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.config.schema import Config
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.models.networks import blueprint
from asyncrl.learner.models.roles import LEARNING, POLICY
from asyncrl.learner.training.objective import PolicyObjective
from asyncrl.learner.training.outcome_objective import OutcomeObjective
from asyncrl.learner.training.passes import LearningModel, LocalModel, Objective
from asyncrl.learner.training.requirements import first_policy_version, norm_tokens, steps_per_version
from asyncrl.learner.training.schedule import learning_rate
from asyncrl.learner.training.value_objective import ValueObjective
from asyncrl.types import Version


@dataclass(frozen=True, slots=True)
class Trainable:
    """since: the first version it learns from · skips_flat: its loss is exactly 0 on groups without an advantage ·
    on_pool: its passes and steps are made there"""

    name: str
    model: LearningModel
    objective: Objective
    optimizer: OptimizerConfig
    since: Version = 0
    skips_flat: bool = False
    on_pool: bool = False

    def lr(self, version: Version, number: int, config: Config) -> float:
        """Of optimizer step `number` of `version`. The schedule runs over all steps of this model in the run."""
        per_version = steps_per_version(config)
        step = (version - self.since) * per_version + number
        steps = (config.run.versions - self.since) * per_version
        return learning_rate(step, steps, self.optimizer)


def trainables(
    backend: Backend, config: Config, pooled: Mapping[str, LearningModel] | None = None
) -> list[Trainable]:
    """The policy, and the models beside it that learn: the backend's, and those on pools."""
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
    every = {**own, **(pooled or {})}
    for name in LEARNING:
        optimizer = blueprint(name, config).optimizer
        if name in every and optimizer is not None:
            made = objective_beside(name, config)
            found.append(Trainable(name, every[name], made, optimizer, on_pool=name not in own))
    return found


def objective_beside(name: str, config: Config) -> ValueObjective | OutcomeObjective:
    """Of a model beside the policy that learns; wherever it does."""
    match name:
        case "critic":
            return ValueObjective(name, "values", "returns", config.critic.clip)
        case "cost_critic":
            return ValueObjective(name, "cost_values", "cost_returns", config.critic.clip)
        case "reward_model":
            return OutcomeObjective(config.algorithm.prm_beta)
    raise ValueError(f"no model that learns beside the policy is called {name!r}")
