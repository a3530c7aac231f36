"""Every model that learns, with its objective, its optimizer settings and its learning rate.

    policy                 PolicyObjective     from version critic.warmup_versions on
    critic, cost_critic    ValueObjective      from the first version
    reward_model           OutcomeObjective    from the first version, unless it is frozen

All of them train in the same optimizer steps, each with its own denominator, optimizer and schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.config.schema import Config
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.models.networks import blueprint
from asyncrl.learner.models.roles import LEARNING, POLICY
from asyncrl.learner.training.objectives import PolicyObjective, auxiliary_objective
from asyncrl.learner.training.passes import LearningModel, LocalModel, Objective
from asyncrl.learner.training.requirements import first_policy_version, norm_tokens, steps_per_version
from asyncrl.types import Version


@dataclass(frozen=True, slots=True)
class Trainable:
    """A model that learns.

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


def trainables(
    backend: Backend, config: Config, remote_models: Mapping[str, LearningModel] | None = None
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
    every = {**own, **(remote_models or {})}
    for name in LEARNING:
        optimizer = blueprint(name, config).optimizer
        if name in every and optimizer is not None:
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
