"""docs/agents.md: its examples are the example's, and run."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from agent_cases import SAMPLING, Speaker, agent

from asyncrl.config.docs import key_comments
from asyncrl.config.sections.agent import AgentConfig
from asyncrl.generator.agents.tools import Tool, load_tools
from asyncrl.types import Task

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "agents.md").read_text("utf-8")


def shown(language: str) -> list[str]:
    return [block.partition("```")[0].strip() for block in PAGE.split(f"```{language}")[1:]]


def test_the_tool_is_that_of_the_example(monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    assert shown("python")[0] in (ROOT / "examples" / "calculator_agent.py").read_text("utf-8")
    settings = AgentConfig(**yaml.safe_load(shown("yaml")[0])["agent"])
    (multiply,) = load_tools(settings.tools)
    assert Tool.of(multiply).schema["function"]["parameters"]["required"] == ["a", "b"]


async def test_the_environment_can_be_played() -> None:
    made: dict[str, Any] = {}
    exec(shown("python")[1], made)

    def halving(so_far: str) -> str:
        low, high, guess = 0, 100, 50
        for hint in re.findall("higher|lower", so_far):
            low, high = (guess + 1, high) if hint == "higher" else (low, guess)
            guess = (low + high) // 2
        return str(guess)

    task = Task(0, "a number below 100", {"number": 31})
    for limit, reward in ((7, 1.0), (2, 0.0)):
        played = await agent(Speaker(halving), partial(made["Guess"], limit)).play(task, "r", SAMPLING)
        assert (played.ended, played.rollout({}).reward) == ("done", reward)


def test_every_key_is_told_of() -> None:
    assert all(key_comments().get(f"agent.{key}") for key in AgentConfig.__dataclass_fields__)
