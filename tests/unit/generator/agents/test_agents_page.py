"""docs/agents.md: its examples are the example's, and run."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from agent_cases import SAMPLING, Speaker, agent
from pages import blocks, text_of
from site_pages import keys

from asyncrl.config.sections.agent import AgentConfig
from asyncrl.generator.agents.tools import Tool, load_tools
from asyncrl.types import Task

ROOT = Path(__file__).parents[4]
PAGE = text_of("docs/agents.md")


def test_the_tool_is_that_of_the_example(monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    assert blocks("docs/agents.md", "python")[0].strip() in (
        ROOT / "examples" / "calculator_agent.py"
    ).read_text("utf-8")
    settings = AgentConfig(**yaml.safe_load(blocks("docs/agents.md", "yaml")[0])["agent"])
    (multiply,) = load_tools(settings.tools)
    assert Tool.of(multiply).schema["function"]["parameters"]["required"] == ["a", "b"]


async def test_the_environment_can_be_played() -> None:
    made: dict[str, Any] = {}
    exec(blocks("docs/agents.md", "python")[1], made)

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


def test_every_key_is_on_the_page() -> None:
    named = {key.split(".")[1] for key, _ in keys(PAGE) if key.startswith("agent.")}
    for settings in blocks("docs/agents.md", "yaml"):
        named |= set(yaml.safe_load(settings)["agent"])
    assert named == set(AgentConfig.__dataclass_fields__)
