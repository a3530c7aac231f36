"""What the policy acts in: an environment takes each of its turns and says what comes next.

    reset(task) ─▸ messages ─▸ [turn] ─▸ step(reply) ─▸ messages, reward ─▸ [turn] ─▸ step(reply) ─▸ done

One object lives for one rollout. `ToolEnvironment` is the usual one: calls are answered by tools, a turn without a
call is the answer.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.generator.agents.chat import Message, tool_message
from asyncrl.generator.agents.tool_formats import AnyCall, BadCall
from asyncrl.generator.agents.tools import Schema, Toolbox, ToolError
from asyncrl.types import Task


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the policy. calls: those in its text, by `agent.tool_format`."""

    text: str
    calls: tuple[AnyCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment answers to a turn.

    messages  for the policy, before its next turn
    reward    of the turn just taken: a number (the part 'steps'), or parts by name; `reward.weights` weighs them
    done      the rollout is over; messages are then of no use
    state     that the next turn begins in, for algorithms that compare turns of one task that begin in equal states
              (gigpo, hgpo). None: all the tokens before it
    """

    messages: Sequence[Message] = ()
    reward: float | Mapping[str, float] = 0.0
    done: bool = False
    state: str | bytes | int | None = None


class Environment(ABC):
    """One rollout's environment: `agent.environment` names a class of this kind, made with `agent.options`.

    tools      schemas that the chat template shows to the policy
    stateless  a rollout that another generator began goes on without this one having seen its first turns. Else they
               are repeated to it, and the rollout begins anew unless everything it says is the same again
    counts     of what happened, for the metrics agent/<name>
    """

    tools: Sequence[Schema] = ()
    stateless: bool = False

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @abstractmethod
    async def reset(self, task: Task) -> Sequence[Message]:
        """Begin, maybe not for the first time: the messages before the policy's first turn."""

    @abstractmethod
    async def step(self, reply: Reply) -> Observation:
        """Answer one turn."""

    async def close(self) -> None:  # noqa: B027
        """The rollout is over, or given up."""


class ToolEnvironment(Environment):
    """Calls are answered, those of one turn at the same time; a turn without calls ends the rollout.

    An environment with a state may derive from it and give methods of its own as tools. role: of the answers.
    """

    def __init__(
        self, tools: Sequence[Callable[..., Any]] | Toolbox, role: str = "tool", **options: Any
    ) -> None:
        """options: of `Toolbox`, for tools that come as functions."""
        super().__init__()
        self._box = tools if isinstance(tools, Toolbox) else Toolbox(tools, **options)
        self._role, self._answered = role, 0
        self.tools = self._box.schemas
        methods = any(inspect.ismethod(tool.function) for tool in self._box.tools.values())
        self.stateless = type(self) is ToolEnvironment and not methods

    async def reset(self, task: Task) -> Sequence[Message]:
        if isinstance(task.prompt, str):
            return [{"role": "user", "content": task.prompt}]
        return task.prompt

    async def step(self, reply: Reply) -> Observation:
        if not reply.calls:
            return Observation(done=True)
        texts = await asyncio.gather(*map(self._answer, reply.calls))
        numbers = range(self._answered, self._answered + len(texts))
        self._answered += len(texts)
        return Observation(
            [
                tool_message(text, self._role, getattr(call, "name", "tool"), number)
                for text, call, number in zip(texts, reply.calls, numbers, strict=True)
            ]
        )

    async def _answer(self, call: AnyCall) -> str:
        self.counts["calls"] += 1
        if isinstance(call, BadCall):
            self.counts["malformed"] += 1
            return f"Error: {call.problem}"
        try:
            return await self._box.call(call)
        except ToolError as error:
            self.counts["tool_late" if error.late else "tool_errors"] += 1
            return f"Error: {error}"


def of_the_environment(task: Task, text: str) -> dict[str, float]:
    """`reward.function` of tasks whose reward is what their environment gives, and nothing else."""
    return {}
