"""The agent of examples/openai_agent.py as OpenAI's Agents SDK plays it."""

from __future__ import annotations

import functools
from typing import Any

from asyncrl.types import Task

MOST_TURNS = 3


@functools.cache
def _client(base_url: str) -> Any:
    """One pool of connections for all rollouts."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=base_url, api_key="each rollout has its own")


async def run(base_url: str, api_key: str, task: Task) -> None:
    import agents

    def multiply(a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: the first
            b: the second
        """
        return a * b

    agents.set_tracing_disabled(True)
    client = _client(base_url).with_options(api_key=api_key)
    model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agent = agents.Agent(name="calculator", model=model, tools=[agents.function_tool(multiply)])
    await agents.Runner.run(agent, str(task.prompt), max_turns=MOST_TURNS)
