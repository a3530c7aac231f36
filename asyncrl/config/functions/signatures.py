"""Whether a user's function can be called the way that it will be, which is seen before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """A reward function as another trainer has it: the names by which it is known, and what to write around it."""

    trainer: str
    names: frozenset[str]
    written: str
    instead: str


SHAPES = (
    Shape(
        "verl",
        frozenset({"data_source", "solution_str", "ground_truth"}),
        "compute_score(data_source, solution_str, ground_truth, extra_info=None)",
        "def reward(task, text): return {name}(task.data['data_source'], text, task.data['ground_truth'], "
        "task.data.get('extra_info'))  # of a dict that it returns, return its 'score'",
    ),
    Shape(
        "TRL",
        frozenset({"completions"}),
        "reward(prompts, completions, **kwargs)",
        "def reward(task, texts): return {name}({prompts}completions=texts, **{{key: [value] * len(texts) for key, "
        "value in task.data.items()}})  # with reward.per=group",
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
            raise ConfigError(
                key, spec, f"{takes} is a reward function of {shape.trainer}", _around(shape, spec, signature)
            )
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
    raise ConfigError(
        key,
        spec,
        f"is called with ({given}), and takes {signature}",
        f"write def {spec.rpartition(':')[2].rpartition('.')[2]}({given}): …",
    )


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


def _around(shape: Shape, spec: str, signature: inspect.Signature) -> str:
    """The wrapper to write around a function of another trainer."""
    prompts = "prompts=[task.prompt] * len(texts), " if "prompts" in signature.parameters else ""
    code = shape.instead.format(name=spec.rpartition(":")[2], prompts=prompts)
    return f"put a function around it, and name that one: {code}"
