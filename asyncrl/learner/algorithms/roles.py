"""The models beside the policy: those that learners know, and those that users declare.

    name              kind           outputs             learns
    critic            critic         values              from returns
    cost_critic       critic         cost_values         from cost_returns
    reward_model      reward_model   reward_model        from outcomes, unless it is frozen
    reference         frozen         reference           –
    teacher           frozen         teacher             –
    with `critic`     critic         <name>_values       from <name>_returns, by a function of the user
    with `frozen`     frozen         <name>              –

Outputs and targets are columns of the batch. A model is in a run if the algorithm needs it by its name.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import Tensor

from asyncrl.config.functions.function_spec import load_function, origin_of
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.placement import POOL_NAME
from asyncrl.types import COLUMNS

POLICY: Final = "policy"
REFERENCE: Final = "reference"

Loss = Callable[..., Tensor]
"""(micro-batch on the device, the model's outputs) → a sum to differentiate.

Outputs are log-probs and entropies, or a critic's values: all [N] float32, 0 where the loss mask is 0. With
`algorithm.teacher_loss.form: topk` a third one, [N, K + 1]: log-probs of the teacher's most likely tokens, and of all
others together."""

Targets = Callable[[Any, AlgorithmConfig], Tensor]
"""(whole groups as a MicroBatch, section) → [N] targets of a critic; values outside the loss mask are ignored."""


@dataclass(frozen=True, slots=True)
class ModelRole:
    """A model beside the policy. Critics compute values, the others log-probs.

    outputs   the column of its outputs
    returns   of a critic: the column of its targets
    targets   of a user's critic: computes them
    path      of a user's frozen model
    """

    kind: Literal["critic", "reward_model", "frozen"]
    outputs: str
    returns: str = ""
    targets: Targets | None = None
    path: str | None = None


BUILT_IN: Final = {
    "critic": ModelRole("critic", "values", "returns"),
    "cost_critic": ModelRole("critic", "cost_values", "cost_returns"),
    "reward_model": ModelRole("reward_model", "reward_model"),
    "reference": ModelRole("frozen", "reference"),
    "teacher": ModelRole("frozen", "teacher"),
}
ROLES: Final[dict[str, ModelRole]] = dict(BUILT_IN)
"""All that have been declared, in the order in which those that learn are trained."""


RESERVED: Final = frozenset(
    {
        *(POLICY, "now", "sharper", "outcome", "kept", "weight", "lm", "selected", "share", "rewards"),
        *("likeliest", "teacher_likeliest"),
        *("group", "batch", "greedy", "steps", "parts", "proximal", "squares", "rollout"),
        *("queue", "learner", "generator", "generators", "dash", "redis"),
        *COLUMNS,
    }
)
"""Names of columns, needs and processes."""


def critic(name: str) -> Callable[[Targets], Targets]:
    """Declare a critic with the targets of this function: a network as the section `critic:` has it.

    Raises ValueError for a name that is taken or that is none, and for targets that are no function.
    """

    def declare(targets: Targets) -> Targets:
        if not inspect.isfunction(targets):
            raise ValueError(
                f"the targets of {name!r} are no function: write def {name}_returns(batch, config): …"
            )
        _declare(name, ModelRole("critic", f"{name}_values", f"{name}_returns", targets))
        return targets

    return declare


def frozen(name: str, path: str | os.PathLike[str]) -> None:
    """Declare a language model that gives its log-probs of the tokens. path: its folder or hub name; the tokenizer is
    the policy's. Raises ValueError as `critic`."""
    _declare(name, ModelRole("frozen", name, path=os.path.expanduser(os.fspath(path))))


def role_of(name: str, config: AlgorithmConfig) -> ModelRole:
    """One of ROLES, once the user's files have been loaded. ValueError for a name that nobody has declared."""
    for key in ("own_advantage", "own_loss"):
        if (spec := getattr(config, key)) is not None:
            load_function(spec, f"algorithm.{key}")
    if name not in ROLES:
        raise ValueError(f"no model is called {name!r}")
    return ROLES[name]


def learning() -> list[str]:
    """The models beside the policy that are trained. A reward model may be frozen instead."""
    return [name for name, role in ROLES.items() if role.kind != "frozen"]


def _declare(name: str, role: ModelRole) -> None:
    if not POOL_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name for a model: use at most 40 small letters, digits and _")
    again = name in ROLES and _same(ROLES[name], role)
    used = {column for one in ROLES.values() for column in (one.outputs, one.returns)}
    of_generators = name.startswith("generators_")  # as clusters call pools of placement.generators
    taken = name in RESERVED or name in ROLES or of_generators
    if not again and (taken or used & {role.outputs, role.returns or role.outputs}):
        raise ValueError(f"{name!r} is the name of something else: choose another for this model")
    ROLES[name] = role


def _same(one: ModelRole, other: ModelRole) -> bool:
    if one.targets is None or other.targets is None:
        return one == other
    return origin_of(one.targets) == origin_of(other.targets)
