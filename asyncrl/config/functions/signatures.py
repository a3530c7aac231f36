"""Whether a user's function can be called the way that it will be, which is seen before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of another trainer's reward functions: parameters by which one is recognized, and the keys of `reward`
    that call it."""

    trainer: str
    names: frozenset[str]
    keys: str


SHAPES = (
    Shape(
        "verl",
        frozenset({"data_source", "solution_str", "ground_truth"}),
        "{{function: 'asyncrl.rewards:Verl', options: {{path: '{where}', name: {name}}}}}",
    ),
    Shape(
        "TRL",
        frozenset({"completions"}),
        "{{function: 'asyncrl.rewards:Trl', per: group, options: {{function: '{where}:{name}'}}}}",
    ),
)


def check_reward(function: Callable[..., Any], spec: str, key: str, per: str) -> None:
    """Raise ConfigError unless `function`, with its options, can be called with a task and its texts alone.

    per: `reward.per`, 'rollout' or 'group'.
    """
    signature = _signature(function)
    if signature is None:
        return
    takes = f"{spec.rpartition(':')[2]}({', '.join(map(str, signature.parameters.values()))})"
    for shape in SHAPES:
        if shape.names <= signature.parameters.keys():
            where, _, name = spec.rpartition(":")
            called = shape.keys.format(where=where, name=name)
            rule = f"{takes} is a reward function of {shape.trainer}"
            raise ConfigError(key, spec, rule, f"set {key.removesuffix('.function')} to {called}")
    what = "texts" if per == "group" else "text"
    if _takes(signature, 2) or _takes(signature, 3):
        return
    name = "reward" if spec.startswith("builtins:") else spec.rpartition(":")[2]
    more = "rollouts" if per == "group" else "rollout"
    raise ConfigError(
        key,
        spec,
        f"is called with (task, {what}) or (task, {what}, {more}), and is {takes}",
        f"write def {name}(task, {what}): …; what else it needs is in task.data or comes by keyword "
        "from the options",
    )


def check_arguments(function: Callable[..., Any], spec: str, key: str, *names: str) -> None:
    """Raise ConfigError unless `function` can be called with these arguments by position."""
    signature = _signature(function)
    if signature is None or _takes(signature, len(names)):
        return
    given = ", ".join(names)
    rule = f"is called with ({given}), and takes {signature}"
    raise ConfigError(key, spec, rule, f"write def {spec.rpartition(':')[2].rpartition('.')[2]}({given}): …")


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature; None if there is none to inspect, as for some functions written in C."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True
