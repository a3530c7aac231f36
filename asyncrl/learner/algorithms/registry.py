"""The registries of algorithms: function, source, and needs from the learner.

    @advantage("rloo", source="arXiv 2402.14740", needs={"group"})
    def rloo(batch, config, context): ...

A decorator registers a function under its literal of `AlgorithmConfig`; importing the package `algorithms` imports
every file that does so. A new algorithm is one function, one literal, one test with hand-computed numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, TypeVar, cast, get_args

from torch import Tensor

from asyncrl.config.functions.function_spec import load_function, origin_of
from asyncrl.config.functions.signatures import check_arguments
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.algorithms.roles import ROLES
from asyncrl.learner.data.batch import MicroBatch

Need = Literal[
    "group",
    "batch",
    "critic",
    "cost_critic",
    "reference",
    "greedy",
    "steps",
    "reward_model",
    "teacher",
    "parts",
    "proximal",
    "squares",
    "rollout",
]
"""
group         at least two rollouts of each task
batch         all groups of the version at once; without it groups are trained on as they arrive
critic, cost_critic, reference, reward_model, teacher
              this model, beside the policy: the columns values, cost_values, reference, reward_model, teacher
greedy        the reward of one greedy rollout of each task: `MicroBatch.greedy_R`
steps         where steps begin and in which state: the columns step, anchor, step_rewards
parts         the reward in parts: `MicroBatch.parts_R`
proximal      log-probs of the policy at the version's start, of the whole batch before the loss: the column proximal
squares       Σπ² over the vocabulary at each token, under the policy at the version's start: the column squares
rollout       of losses: all segments of a rollout in one pass, however many tokens these are

A model that a user has declared (`roles.py`) is needed by its name.
"""

NEEDS: Final = frozenset(get_args(Need))

Gather = Callable[[Tensor], list[Tensor]]
"""A tensor of this rank → those of all ranks in rank order; sizes of dimension 0 may differ. Every rank must call."""


def alone(mine: Tensor) -> list[Tensor]:
    """The `Gather` of a single rank."""
    return [mine]


@dataclass(frozen=True, slots=True)
class AlgorithmContext:
    """The inputs of an algorithm beside its batch and its configuration.

    gather           for statistics over the batch of all ranks
    cost_multiplier  λ of safe_rlhf at this version
    part_weights     `reward.weights`: of the reward's parts in its sum; 1 for parts that it lacks
    seed             (run.seed, version): random draws are a function (`counter_rng.uniform`) of this, the ordinal, the
                     rollout's place in its group and the token's place in it, and so independent of batching and ranks
    """

    gather: Gather = alone
    cost_multiplier: float = 1.0
    part_weights: Mapping[str, float] = field(default_factory=dict)
    seed: tuple[int, ...] = (0,)


F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Algorithm(Generic[F]):
    """An algorithm: the function, whose docstring opens with its definition in one sentence, where it comes from, and
    what it needs."""

    function: F
    source: str
    needs: frozenset[str]


Estimator = Callable[[MicroBatch, AlgorithmConfig, AlgorithmContext], Tensor]
"""Whole groups → advantages_N, before `advantage_scale`; values outside the mask are ignored."""

ARGUMENTS: Final = {"own_advantage": ("batch", "config", "context"), "own_loss": ("terms", "config")}
"""Parameters of a user's own functions."""

ADVANTAGES: Final[dict[str, Algorithm[Estimator]]] = {}
LOSSES: Final[dict[str, Algorithm[Callable[..., Any]]]] = {}
CORRECTIONS: Final[dict[str, Algorithm[Callable[..., Any]]]] = {}
REJECTIONS: Final[dict[str, Algorithm[Callable[..., Any]]]] = {}


def advantage(name: str, source: str, needs: Collection[str] = ()) -> Callable[[F], F]:
    """Register an `Estimator` under a literal of `algorithm.advantage`."""
    return register(ADVANTAGES, name, source, needs)


def loss(name: str, source: str, needs: Collection[str] = ()) -> Callable[[F], F]:
    """Register a loss per token under a literal of `algorithm.loss`."""
    return register(LOSSES, name, source, needs)


def register(
    entries: dict[str, Algorithm[Any]], name: str, source: str, needs: Collection[str] = ()
) -> Callable[[F], F]:
    """Register a function under a literal of the key of `entries`. Raises ValueError for a literal that is taken."""

    def into_entries(function: F) -> F:
        if name in entries and origin_of(entries[name].function) != origin_of(function):
            raise ValueError(f"two algorithms are called {name!r}: {entries[name].function} and {function}")
        entries[name] = Algorithm(function, source, frozenset(needs))
        return function

    return into_entries


def advantage_of(config: AlgorithmConfig) -> Algorithm[Estimator]:
    """`algorithm.own_advantage` if set, else `algorithm.advantage`. Raises ConfigError if it cannot be loaded."""
    return _own(config.own_advantage, "own_advantage", ADVANTAGES) or ADVANTAGES[config.advantage]


def loss_of(config: AlgorithmConfig) -> Algorithm[Callable[..., Any]]:
    """`algorithm.own_loss` if set, else `algorithm.loss`. Raises ConfigError if it cannot be loaded."""
    return _own(config.own_loss, "own_loss", LOSSES) or LOSSES[config.loss]


def needs(config: AlgorithmConfig) -> frozenset[str]:
    """All needs of the section `algorithm:`; the number of optimizer steps per version does not matter here. Raises
    ConfigError for an own function that cannot be loaded or has an unknown need."""
    correction = config.correction
    of_rejections = (REJECTIONS[name].needs for name in (correction.reject, *correction.also_reject))
    found = set(advantage_of(config).needs | loss_of(config).needs | CORRECTIONS[correction.kind].needs)
    found.update(*of_rejections)
    found.update(config.kl_terms)
    if config.shaping.kl_coef > 0:
        found.add("reference")
    if config.shaping.kl_target is not None or config.shaping.resample != "none" or config.lm_coef > 0:
        found.add("batch")
    if correction.normalise:
        found.add("batch")
    judged = correction.normalise or correction.reject != "none"
    if "squares" in found or (judged and config.proximal != "behaviour"):
        found.add("proximal")
    if unknown := sorted(found - NEEDS - ROLES.keys()):
        key = "own_advantage" if unknown[0] in advantage_of(config).needs else "own_loss"
        raise ConfigError(
            f"algorithm.{key}",
            getattr(config, key),
            f"needs {unknown[0]!r}, which is neither a built-in need nor a model that its file declares",
            "declare it with `critic` or `frozen` of asyncrl.learner.algorithms.roles, or name some of "
            f"{', '.join(sorted(NEEDS | ROLES.keys()))}",
        )
    return frozenset(found)


def _own(spec: str | None, key: str, entries: Mapping[str, Algorithm[F]]) -> Algorithm[F] | None:
    """The entry of a user's function; one that no decorator registered needs whole rollouts and nothing else."""
    if spec is None:
        return None
    function = load_function(spec, f"algorithm.{key}")
    check_arguments(function, spec, f"algorithm.{key}", *ARGUMENTS[key])
    registered = (entry for entry in entries.values() if entry.function is function)
    return next(registered, Algorithm(cast(F, function), "", frozenset({"rollout"})))
