"""The requirements of a configuration on the learner: models, their places, kind of version step, extra passes.

Functions of the configuration alone, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.config.sections.placement import REWARDS
from asyncrl.learner.algorithms.registry import needs
from asyncrl.learner.models.roles import LEARNING, MODELS
from asyncrl.queue.protocol.settings import StageSettings
from asyncrl.types import WITHOUT_STEPS, Version

COLUMN_OF: Mapping[str, str] = {"critic": "values", "cost_critic": "cost_values"}
"""Columns that are not called as the model whose outputs they hold."""

PIPELINE_FILL = 4
"""Micro-batches of one claim for each process of a pipeline, if so much is ready: it idles a fifth of the time then."""


def models(config: Config) -> frozenset[str]:
    """The models beside the policy, by their names in `roles.MODELS`."""
    return MODELS & needs(config.algorithm)


def colocated(config: Config) -> frozenset[str]:
    """The models that the learner holds itself; the outputs of the others come as columns of the groups."""
    return models(config) - config.placement.pools.keys()


def models_trained_in_pools(config: Config) -> tuple[str, ...]:
    """The models that learn in pools, in step with the policy."""
    frozen = {"reward_model"} if config.reward_model.frozen else set()
    return tuple(name for name in LEARNING if name in config.placement.pools.keys() - frozen)


def stages(config: Config) -> tuple[StageSettings, ...]:
    """The queue's stages for committed groups: each pool adds one column.

    Where a pool computes the rewards that groups are filtered by, no model works on a group that may be dropped.
    """
    pools, filtered = config.placement.pools, config.algorithm.filter != "none"
    needed = (REWARDS,) if REWARDS in pools and filtered else ()
    return tuple(
        StageSettings(name, needs=() if name == REWARDS else needed, adds=(COLUMN_OF.get(name, name),))
        for name in pools
    )


def evaluation_stages(config: Config) -> tuple[StageSettings, ...]:
    """The stages for answers to held-out tasks."""
    return (StageSettings(REWARDS, adds=(REWARDS,)),) if REWARDS in config.placement.pools else ()


def first_policy_version(config: Config) -> Version:
    """The first version that the policy learns from; before, its critic warms up alone."""
    return config.critic.warmup_versions if "critic" in models(config) else 0


def columns(config: Config) -> tuple[str, ...]:
    """Columns that groups of every version must come with; some of its groups may lack them."""
    return tuple(WITHOUT_STEPS) if "steps" in needs(config.algorithm) else ()


def parts(config: Config) -> tuple[str, ...]:
    """Reward parts that groups of every version must come with, likewise."""
    return (config.algorithm.cost_part,) if "cost_critic" in models(config) else ()


def steps_per_version(config: Config) -> int:
    """Optimizer steps of a full version."""
    return config.learner.mini_batches * config.learner.epochs


def whole_batch(config: Config) -> bool:
    """Whether training waits for the last group of a version: for statistics over all of them, or to split them over
    several optimizer steps. The rest streams."""
    return steps_per_version(config) > 1 or "batch" in needs(config.algorithm)


def claim_tokens(config: Config) -> int:
    """Most tokens that a data rank claims at once: one micro-batch, or several that fill a pipeline.

    With m micro-batches and p stages a pipeline idles (p - 1) / (m + p - 1) of the time (GPipe, arXiv 1811.06965).
    """
    learner = config.learner
    fill = PIPELINE_FILL * learner.parallel.pipeline if learner.parallel.pipeline > 1 else 1
    return learner.micro_batch_tokens * fill


def proximal_pass(config: Config) -> bool:
    """Whether an extra forward pass records the policy's log-probs at the version's start. Where each version is one
    optimizer step, the policy has not moved when its loss is computed, and most losses need no such pass."""
    moves = config.algorithm.proximal == "frozen" and steps_per_version(config) > 1
    return moves or "proximal" in needs(config.algorithm)


def norm_tokens(config: Config) -> int:
    """The denominator of the aggregation 'seq-mean-token-sum-norm', resolved."""
    return config.algorithm.norm_tokens or config.generator.max_tokens


def check(config: Config) -> None:
    """The rules that depend on the algorithm's needs. Raises ConfigError for an own function that cannot be loaded or
    lacks what it declares, and for a setting of a model that the algorithm does not have."""
    needed = needs(config.algorithm)
    require(
        "group" not in needed or config.batch.group_size >= 2,
        "batch.group_size",
        config.batch.group_size,
        "is too small: the algorithm compares the rollouts of a group and needs at least 2",
        "set batch.group_size=8",
    )
    require(
        "greedy" not in needed or config.greedy_rollout,
        "algorithm.own_advantage",
        config.algorithm.own_advantage,
        "needs a greedy rollout of each task, which generators make for advantage remax alone",
        "set algorithm.advantage=remax beside it",
    )
    of_models: dict[str, object] = {
        "critic.path": config.critic.path,
        "critic.warmup_versions": config.critic.warmup_versions,
        "reference.path": config.reference.path,
        "reference.update_every": config.reference.update_every,
        "reward_model.path": config.reward_model.path,
        "teacher.path": config.teacher.path,
    }
    of_models |= {f"placement.{name}.where": "pool" for name in config.placement.pools.keys() - {REWARDS}}
    for key, value in of_models.items():
        model = key.removeprefix("placement.").partition(".")[0]
        rule = f"would do nothing: the algorithm has no {model}"
        remedy = "leave it out, or see `asyncrl algorithms` for who needs that model"
        require(model in needed or not value, key, value, rule, remedy)
