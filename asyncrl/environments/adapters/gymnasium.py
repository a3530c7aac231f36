"""Environments of Gymnasium whose states can be shown as text.

agent:
  environment: asyncrl.environments.adapters.gymnasium:Gymnasium
  options: {id: FrozenLake-v1, arguments: {render_mode: ansi}, actions: [left, down, right, up]}
tasks:
  source: asyncrl.environments.adapters:seeds
  options: {size: 1000, prompt: "Reach the goal. Answer with left, down, right or up."}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.rules import require
from asyncrl.environments.adapters import imported
from asyncrl.environments.turns import answer, opening
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.chat import Message
from asyncrl.generator.agents.env import Action, Environment, Observation
from asyncrl.types import Task

REMEDY = "see gymnasium.pprint_registry(); module:name imports the module first"


class Gymnasium(Environment):
    """A turn names an action; the messages show what `render_mode: ansi` renders, or the observation as text.

    id         as `gymnasium.make` takes it
    arguments  keywords of `gymnasium.make`
    actions    names of the actions of a discrete space, in its order; none: their numbers. The last name in a turn
               counts. In a text space, the whole turn is the action
    act        for other spaces, file.py:function: (text of a turn) -> the action, or None if it names none
    show       file.py:function: (observation, info) -> text, in place of the rendered one

    The seed of a rollout is task.data["seed"], or the task's ordinal. A turn that names no action counts as
    `malformed`, and is answered with the names.
    """

    def __init__(
        self,
        id: str,
        arguments: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        act: str | None = None,
        show: str | None = None,
    ) -> None:
        super().__init__()
        self._made = _made(id, arguments or {})
        self._names = _names(id, self._made.action_space, actions, act)
        self._act = self._named if act is None else load_function(act, "act")
        self._show = self._rendered if show is None else load_function(show, "show")

    @classmethod
    def check(cls, **options: Any) -> None:
        """Make one environment."""
        cls(**options)._made.close()

    async def reset(self, task: Task) -> Sequence[Message]:
        observation, info = self._made.reset(seed=int(task.data.get("seed", task.ordinal)))
        return opening(task, self._show(observation, info))

    async def step(self, action: Action) -> Observation:
        chosen = self._act(action.text)
        if chosen is None:
            self.counts["malformed"] += 1
            names = f" of {', '.join(self._names)}" if self._names else ""
            return answer(f"That names no action. Name one{names}.")
        observation, reward, terminated, truncated, info = self._made.step(chosen)
        shown = self._show(observation, info)
        return answer(shown, float(reward), terminated or truncated, shown)

    async def close(self) -> None:
        self._made.close()

    def _rendered(self, observation: Any, _: Mapping[str, Any]) -> str:
        return str(self._made.render() if self._made.render_mode == "ansi" else observation)

    def _named(self, text: str) -> Any:
        if not self._names:
            return text
        longest_first = sorted(map(re.escape, self._names), key=len, reverse=True)
        found = re.findall(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", text, re.IGNORECASE)
        return self._names[found[-1].lower()] if found else None


def _made(id: str, arguments: Mapping[str, Any]) -> Any:
    gymnasium = imported("gymnasium", "gymnasium")
    try:
        return gymnasium.make(id, **arguments)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError("id", id, f"{type(error).__name__}: {error}", REMEDY) from None
    except (TypeError, ValueError) as error:
        raise ConfigError("arguments", arguments, str(error), f"give keywords that {id} takes") from None


def _names(id: str, space: Any, actions: Sequence[str], act: str | None) -> dict[str, int]:
    """The actions of a discrete space by their names in small letters; none for other spaces. Raises ConfigError."""
    spaces = imported("gymnasium.spaces", "gymnasium")
    named, discrete = act is None and not isinstance(space, spaces.Text), isinstance(space, spaces.Discrete)
    rule = "is only for a discrete space without act"
    require(named or not actions, "actions", list(actions), rule, "leave it out")
    rule = f"has the action space {space}, which has no names"
    require(discrete or not named, "id", id, rule, "set act=file.py:function, which reads an action")
    if not discrete:
        return {}
    numbers = [int(space.start) + index for index in range(space.n)]
    lower = [name.lower() for name in actions] or [*map(str, numbers)]
    names = dict(zip(lower, numbers, strict=False))
    fits = len(names) == len(lower) == space.n
    require(fits, "actions", list(actions), f"{id} has {space.n} actions", "name each once, in its order")
    return names
