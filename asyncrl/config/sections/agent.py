"""The section `agent`: rollouts of several turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.config.limits import Count, Seconds, Threads
from asyncrl.config.sections.rules import Rule, Section, key


@dataclass(frozen=True)
class AgentConfig(Section):
    """Without tools and environment a rollout is one turn."""

    tools: list[str] = key(
        [],
        "'package.module:function' or 'file.py:function' each, plain or async; type hints and docstring tell "
        "the model how to call it",
    )
    environment: str | None = key(None, "in place of tools: 'package.module:Class', an Environment")
    options: dict[str, Any] = key({}, "keyword arguments of the environment")
    tool_format: Literal["hermes", "llama3", "json"] = key("hermes", "of calls; Qwen writes hermes")
    tool_role: Literal["tool", "user"] = key("tool", "of the messages that hold what a tool returned")
    tool_deadline_s: Seconds = key(10.0, "of one call; a late one is an error message to the model")
    tool_workers: Threads = key(16, "calls at once in one generator")
    tool_chars: Count = key(8192, "most characters of one tool's answer, the rest is cut off")
    max_turns: Count = key(8, "turns of one rollout")
    max_tokens: Count | None = key(
        None, "of one rollout, with prompt and answers of tools; none: generator.max_length"
    )
    deadline_s: Seconds = key(120.0, "of one reset or step of the environment, tool calls included")
    keep: bool = key(True, "finished turns go to the queue, and whoever gets the task next goes on from them")

    @property
    def several_turns(self) -> bool:
        return bool(self.tools) or self.environment is not None

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            not self.tools or self.environment is None,
            "agent.tools",
            self.tools,
            f"stands beside agent.environment={self.environment}, which brings its own tools",
            "set one of the two, or derive the environment from ToolEnvironment",
        )
        yield Rule(
            not self.tools or self.tool_deadline_s < self.deadline_s,
            "agent.tool_deadline_s",
            self.tool_deadline_s,
            f"must be below agent.deadline_s={self.deadline_s}, or the step fails before the call does",
            "set agent.deadline_s higher",
        )
