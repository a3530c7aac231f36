"""The environment that the policy acts in: it takes each turn and returns the next messages.

    reset(task) ─▸ messages ─▸ [turn] ─▸ step(action) ─▸ messages, reward ─▸ [turn] ─▸ step(action) ─▸ done

One object lives for one rollout. `ToolEnvironment` is the usual one: tools answer calls, and a turn without a call is
the final answer.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.functions.signatures import check_arguments
from asyncrl.config.sections.agent import AgentConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.chat import Message, tool_message
from asyncrl.generator.agents.tool_formats import AnyCall, BadCall, ToolCall
from asyncrl.generator.agents.tools import Schema, Toolbox, ToolError, load_tools
from asyncrl.types import Task


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy. calls: those in its text, by `agent.tool_format`."""

    text: str
    calls: tuple[AnyCall, ...] = ()


Reward = float | Mapping[str, float]
"""The reward of a turn: a number (the part 'steps'), or parts by name; `reward.weights` weighs them."""


@dataclass(frozen=True, slots=True)
class Observation:
    """An environment's answer to a turn.

    messages  for the policy, before its next turn
    prompt    in place of messages: all messages of the next turn's prompt, without anything that came before. The
              turn begins a new segment of the rollout
    reward    for the turn just taken
    done      the rollout is over; messages are then of no use
    state     in which the next turn begins, for algorithms that compare turns of one task that begin in equal states.
              None: all the tokens that the turn reads
    """

    messages: Sequence[Message] = ()
    reward: Reward = 0.0
    done: bool = False
    state: str | bytes | int | None = None
    prompt: Sequence[Message] | None = None


class Environment(ABC):
    """One rollout's environment: `agent.environment` names a class of this kind, made with `agent.options`.

    tools      schemas that the chat template shows to the policy
    stateless  a rollout of another generator may continue although this object has not seen its first turns. Otherwise
               they are replayed, and the rollout begins anew unless every observation is the same as before
    counts     events, for the metrics agent/<name>
    """

    tools: Sequence[Schema] = ()
    stateless: bool = False

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @classmethod
    def check(cls, *_: Any, **options: Any) -> None:
        """Raise ConfigError, under the option's name, for options that cannot work. A run calls it before it starts."""
        return

    @abstractmethod
    async def reset(self, task: Task) -> Sequence[Message]:
        """Begin, maybe not for the first time: the messages before the policy's first turn."""

    @abstractmethod
    async def step(self, action: Action) -> Observation:
        """Answer one turn."""

    async def at_limit(self) -> Reward:
        """Called if a limit of turns or tokens ends the rollout, maybe before `step` got its last turn. Returns a
        reward for that turn, which is added to that of `step`."""
        return 0.0

    async def close(self) -> None:  # noqa: B027
        """The rollout is over, or given up."""


class ToolEnvironment(Environment):
    """Answers the calls of a turn concurrently; a turn without calls ends the rollout.

    An environment with a state may derive from it and pass its own methods as tools.

    Args:
        tools: Functions, or a toolbox that many environments share.
        role: Role of the answers.
        options: Keywords of `Toolbox`, for tools that are functions.
    """

    def __init__(
        self, tools: Sequence[Callable[..., Any]] | Toolbox, role: str = "tool", **options: Any
    ) -> None:
        super().__init__()
        self._toolbox = tools if isinstance(tools, Toolbox) else Toolbox(tools, **options)
        self._role, self._answered = role, 0
        self.tools = self._toolbox.schemas
        methods = any(inspect.ismethod(tool.function) for tool in self._toolbox.tools.values())
        self.stateless = type(self) is ToolEnvironment and not methods

    async def reset(self, task: Task) -> Sequence[Message]:
        if isinstance(task.prompt, str):
            return [{"role": "user", "content": task.prompt}]
        return task.prompt

    async def step(self, action: Action) -> Observation:
        if not action.calls:
            return Observation(done=True)
        texts = await self._answers(action.calls)
        first, self._answered = self._answered, self._answered + len(texts)
        return Observation(
            [
                tool_message(text, self._role, getattr(call, "name", "tool"), first + index)
                for index, (text, call) in enumerate(zip(texts, action.calls, strict=True))
            ]
        )

    async def _answers(self, calls: Sequence[AnyCall]) -> Sequence[str]:
        return await asyncio.gather(*map(self._answer, calls))

    async def _answer(self, call: AnyCall) -> str:
        self.counts["calls"] += 1
        if isinstance(call, BadCall):
            self.counts["malformed"] += 1
            return f"Error: {call.problem}"
        try:
            return await self._call(call)
        except ToolError as error:
            self.counts["tool_late" if error.late else "tool_errors"] += 1
            return f"Error: {error}"

    async def _call(self, call: ToolCall) -> str:
        """Raises ToolError, with a text for the model."""
        return await self._toolbox.call(call)


def load_environment(spec: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """A function that makes an environment for each rollout. Raises ConfigError.

    Args:
        spec: `agent.environment`.
        options: `agent.options`.
    """
    make = load_function(spec, "agent.environment")
    if isinstance(make, type):
        if not issubclass(make, Environment):
            rule, remedy = "is no asyncrl.generator.agents.env.Environment", "derive it from that class"
            raise ConfigError("agent.environment", spec, rule, remedy)
        for method, *names in (("reset", "self", "task"), ("step", "self", "action")):
            check_arguments(getattr(make, method), f"{spec}.{method}", "agent.environment", *names)
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        takes = ", ".join(inspect.signature(make).parameters) or "nothing"
        raise ConfigError("agent.options", dict(options), str(error), f"{spec} takes {takes}") from None
    if isinstance(make, type):
        try:
            cast(type[Environment], make).check(**options)
        except ConfigError as error:
            key = error.key if error.key.startswith("agent.") else f"agent.options.{error.key}"
            raise ConfigError(key, error.value, error.rule, error.remedy) from None
    return cast(Callable[[], Environment], partial(make, **options))


def environments(config: AgentConfig) -> Callable[[], Environment]:
    """As `load_environment`, also for tools without an environment, which share a toolbox."""
    if config.environment is not None:
        return load_environment(config.environment, config.options)
    tools = load_tools(config.tools)
    box = Toolbox(tools, config.tool_deadline_s, config.tool_workers, config.tool_chars)
    return partial(ToolEnvironment, box, config.tool_role)


def of_the_environment(task: Task, text: str) -> dict[str, float]:
    """A `reward.function` that adds nothing to the environment's rewards."""
    return {}
