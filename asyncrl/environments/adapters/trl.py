"""Classes for TRL's `environment_factory`: their methods are tools, and `get_reward` is the reward.

    agent:
      environment: asyncrl.environments.adapters.trl:EnvironmentFactory
      options: {factory: my_file.py:Wordle}
    reward: {function: "asyncrl.generator.agents.env:of_the_environment"}

TRL itself is not needed. A mapping of several factories is not supported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.rules import require
from asyncrl.environments.turns import ScoredTools, opening
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.chat import Message
from asyncrl.generator.agents.env import Reward
from asyncrl.generator.agents.tools import Toolbox
from asyncrl.generator.threads import in_thread
from asyncrl.types import Task

NO_TOOLS = ("reset", "get_reward")
"""Methods that the trainer calls."""


class EnvironmentFactory(ScoredTools):
    """The public methods of an environment are tools; the calls of a turn are made one after another.

    factory     file.py:name of a class or function that makes an environment
    arguments   its keywords
    role        of the answers
    deadline_s  of one call
    chars       most characters of an answer

    `reset` gets the task's prompt and fields by keyword; what it returns is appended to the last message, as TRL does.
    """

    def __init__(
        self,
        factory: str,
        arguments: Mapping[str, Any] | None = None,
        role: str = "tool",
        deadline_s: float = 10.0,
        chars: int = 8192,
    ) -> None:
        self._made = load_function(factory, "factory")(**(arguments or {}))
        super().__init__(_tools(self._made), role, deadline_s=deadline_s, most_chars=chars)

    @classmethod
    def check(cls, factory: str, arguments: Mapping[str, Any] | None = None, **others: Any) -> None:
        """Make one environment."""
        make = load_function(factory, "factory")
        try:
            made = make(**(arguments or {}))
        except TypeError as error:
            remedy = f"give keywords that {factory} takes"
            raise ConfigError("arguments", arguments, str(error), remedy) from None
        fits = callable(getattr(made, "reset", None))
        require(fits, "factory", factory, "makes what has no method reset", "define reset(self, **row)")
        try:
            Toolbox(_tools(made))
        except ConfigError as error:
            raise ConfigError("factory", factory, f"its {error.value}: {error.rule}", error.remedy) from None

    async def reset(self, task: Task) -> Sequence[Message]:
        shown = await _called(self._made.reset, prompt=task.prompt, **task.data)
        return await super().reset(task) if shown is None else opening(task, shown, between="")

    async def at_limit(self) -> Reward:
        score = getattr(self._made, "get_reward", None)
        return 0.0 if score is None else float(await _called(score))


def _tools(made: Any) -> list[Callable[..., Any]]:
    functions = inspect.getmembers(type(made), inspect.isfunction)
    return [getattr(made, name) for name, _ in functions if name not in NO_TOOLS and not name.startswith("_")]


async def _called(function: Callable[..., Any], **keywords: Any) -> Any:
    """Call a plain function, which may block, or an async one."""
    if inspect.iscoroutinefunction(function):
        return await function(**keywords)
    return await in_thread(function, **keywords)
