"""The requirements of a configuration on the learner: models, their places, kind of version step, extra passes.

Functions of the configuration alone, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Collection

from asyncrl.config.functions.signatures import check_arguments
from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.config.sections.placement import REWARDS
from asyncrl.learner.algorithms.registry import needs
from asyncrl.learner.algorithms.roles import ROLES, learning, role_of
from asyncrl.queue.protocol.settings import StageSettings
from asyncrl.types import WITHOUT_STEPS, Version

PIPELINE_FILL = 4
"""Micro-batches of one claim for each process of a pipeline, if so much is ready: it idles a fifth of the time then."""


def models(config: Config) -> frozenset[str]:
    """The models beside the policy, by their names in `roles.ROLES`."""
    needed = needs(config.algorithm)  # loads the user's files, which may declare some
    return frozenset(ROLES.keys() & needed)


def critics(config: Config) -> frozenset[str]:
    """Those that compute values."""
    return frozenset(name for name in models(config) if ROLES[name].kind == "critic")


def colocated(config: Config) -> frozenset[str]:
    """The models that the learner holds itself; the outputs of the others come as columns of the groups."""
    return models(config) - config.placement.pools.keys()


def models_trained_in_pools(config: Config) -> tuple[str, ...]:
    """The models that learn in pools, in step with the policy."""
    frozen = {"reward_model"} if config.reward_model.frozen else set()
    in_pools = models(config) & config.placement.pools.keys()
    return tuple(name for name in learning() if name in in_pools - frozen)


def stages(config: Config) -> tuple[StageSettings, ...]:
    """The queue's stages for committed groups: each pool adds one column.

    Where a pool computes the rewards that groups are filtered by, no model works on a group that may be dropped.
    """
    pools, filtered = config.placement.pools, config.algorithm.filter != "none"
    needed = (REWARDS,) if REWARDS in pools and filtered else ()
    return tuple(
        StageSettings(name, needs=() if name == REWARDS else needed, adds=(column_of(name, config),))
        for name in pools
    )


def column_of(name: str, config: Config) -> str:
    """The column that a pool adds: the outputs of its model, or REWARDS."""
    return name if name == REWARDS else role_of(name, config.algorithm).outputs


def evaluation_stages(config: Config) -> tuple[StageSettings, ...]:
    """The stages for answers to held-out tasks."""
    return (StageSettings(REWARDS, adds=(REWARDS,)),) if REWARDS in config.placement.pools else ()


def first_policy_version(config: Config) -> Version:
    """The first version that the policy learns from; before, its critic warms up alone."""
    return config.critic.warmup_versions if critics(config) else 0


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
    _check_models(config, needed)


def _check_models(config: Config, needed: Collection[str]) -> None:
    """Settings of models are of those that the algorithm has; a model that learns in a pool has one process there."""
    placement, of_critics = config.placement, next(iter(critics(config)), "critic")
    settings: list[tuple[str, str, object]] = [
        (of_critics, "critic.path", config.critic.path),
        (of_critics, "critic.warmup_versions", config.critic.warmup_versions),
        ("reference", "reference.path", config.reference.path),
        ("reference", "reference.update_every", config.reference.update_every),
        ("reward_model", "reward_model.path", config.reward_model.path),
        ("teacher", "teacher.path", config.teacher.path),
    ]
    placed = (placement.pools.keys() | placement.own.keys()) - {REWARDS}
    settings += [
        (name, f"{placement.key_of(name)}.where", placement.places[name].where) for name in sorted(placed)
    ]
    for model, key, value in settings:
        rule = f"would do nothing: the algorithm has no {model}"
        remedy = "leave it out, or see `asyncrl algorithms` for who needs that model"
        if model in placement.own:
            remedy = "leave it out, or name it among the needs of algorithm.own_advantage or own_loss"
        require(model in needed or not value, key, value, rule, remedy)
    for model in models_trained_in_pools(config):
        one = placement.one_process(model)
        require(one.holds, one.key, one.value, one.rule, one.remedy)
    for model in critics(config):
        if (targets := role_of(model, config.algorithm).targets) is not None:
            name = f"{targets.__module__}:{targets.__qualname__}"
            check_arguments(targets, name, f"@critic({model!r})", "batch", "config")
