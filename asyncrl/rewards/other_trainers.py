"""Reward functions that were written for verl or TRL, called as these call them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.config.functions.function_spec import load_function
from asyncrl.types import Rollout, Scored, Task

PACKAGE = "pkg://"
"""verl's mark of a module's name in place of a file's."""


class Verl:
    """verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`, plain or async.

    path         `file.py`, or `package.module`, before which verl writes pkg://
    name         of the function
    options      more keyword arguments: verl's reward_kwargs
    data_source  the field with the name of the data set: verl's reward_fn_key

    The other arguments come from verl's columns reward_model (or a column ground_truth) and extra_info.
    """

    def __init__(
        self,
        path: str,
        name: str = "compute_score",
        options: Mapping[str, Any] | None = None,
        data_source: str = "data_source",
    ) -> None:
        module = path.removeprefix(PACKAGE).replace("/", ".") if path.startswith(PACKAGE) else path
        self._function = load_function(f"{module}:{name}", "path")
        self._options, self._data_source = options or {}, data_source

    def __call__(self, task: Task, text: str) -> Any:
        data = task.data
        result = self._function(
            data_source=data[self._data_source],
            solution_str=text,
            ground_truth=data.get("reward_model", data)["ground_truth"],
            extra_info=dict(data.get("extra_info") or {}),
            **self._options,
        )
        return _then(result, _scored)


class Trl:
    """A function of TRL, `reward(prompts, completions, completion_ids, **columns)`, plain or async, with `per: group`.

    function   'package.module:function' or 'file.py:function'
    arguments  with which `function` is called once, to make the reward function; none: it is one itself

    To a prompt of messages, completions are messages too. A reward None counts as 0.
    """

    per = "group"

    def __init__(self, function: str, arguments: Mapping[str, Any] | None = None) -> None:
        found = load_function(function, "function")
        self._function = found if arguments is None else found(**arguments)

    def __call__(self, task: Task, texts: Sequence[str], rollouts: Sequence[Rollout]) -> Any:
        plain = isinstance(task.prompt, str)
        result = self._function(
            prompts=[task.prompt] * len(texts),
            completions=[text if plain else [{"role": "assistant", "content": text}] for text in texts],
            completion_ids=[_completion(rollout) for rollout in rollouts],
            **{name: [value] * len(texts) for name, value in task.data.items()},
        )
        return _then(result, lambda rewards: [0.0 if reward is None else reward for reward in rewards])


def _then(result: Any, change: Callable[[Any], Any]) -> Any:
    """`change` applied to the result, or to the value of an awaitable one."""

    async def awaited() -> Any:
        return change(await result)

    return awaited() if inspect.isawaitable(result) else change(result)


def _scored(result: Any) -> Any:
    """A mapping has a `score`, and maybe as `pred` the answer that votes count."""
    if not isinstance(result, Mapping):
        return result
    answer = result.get("pred")
    return Scored(result["score"], answer=None if answer is None else str(answer))


def _completion(rollout: Rollout) -> list[int]:
    """All tokens behind the prompt."""
    made = np.flatnonzero(rollout.loss_mask)
    return [int(token) for token in rollout.token_ids[made[0] :]] if made.size else []
