"""Programs that call the policy, and what plays them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent_cases import SAMPLING, TASK, Speaker

from asyncrl.config.schema import Config, ModelConfig
from asyncrl.config.sections.agent import AgentConfig
from asyncrl.config.sections.generator import GeneratorConfig
from asyncrl.generator.gateway.call_record import CallRecord
from asyncrl.generator.gateway.harness import HarnessAgent
from asyncrl.types import Sampling

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


async def unused(base_url: str, api_key: str, task: Any) -> None:
    """Has the form of an agent.function."""


def harness(
    speaker: Any, run: Callable[..., Any] | None = None, max_length: int = 2000, **agent: Any
) -> HarnessAgent:
    """run: in place of `agent.function`"""
    if run is not None:
        agent["function"] = "gateway_cases:unused"
    generator = GeneratorConfig(max_length=max_length, max_tokens=200)
    config = Config(model=ModelConfig(path="unused"), generator=generator, agent=AgentConfig(**agent))
    made = HarnessAgent(speaker, speaker.tok, config)
    if run is not None:
        made._function = run
    return made


async def played(made: HarnessAgent, sampling: Sampling = SAMPLING, **options: Any) -> CallRecord:
    """One rollout, after which the server is closed."""
    try:
        return await made.play(TASK, "r", sampling, **options)
    finally:
        await made.close()


def speaker(*turns: str, **options: Any) -> Speaker:
    """A policy that writes these turns, one after another."""
    left = list(turns)
    return Speaker(lambda so_far: left.pop(0), **options)
