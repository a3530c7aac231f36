"""The section `agent`: rollouts of several turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.config.sections.limits import Count, Seconds, Threads, check_values
from asyncrl.config.sections.rules import require


@dataclass(frozen=True)
class AgentConfig:
    """Without tools and environment a rollout is one turn."""

    tools: list[str] = field(default_factory=list)  # 'package.module:function' or 'file.py:function' each,
    #                        plain or async; type hints and docstring tell the model how to call it
    environment: str | None = None  # in place of tools: 'package.module:Class', an Environment
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the environment
    tool_format: Literal["hermes", "llama3", "json"] = "hermes"  # of calls; Qwen writes hermes
    tool_role: Literal["tool", "user"] = "tool"  # of the messages that hold what a tool returned
    tool_deadline_s: Seconds = 10.0  # of one call; a late one is an error message to the model
    tool_workers: Threads = 16  # calls at once in one generator
    tool_chars: Count = 8192  # most characters of one tool's answer, the rest is cut off
    max_turns: Count = 8  # turns of one rollout
    max_tokens: Count | None = None  # of one rollout, with prompt and answers of tools;
    #                        none: generator.max_length
    deadline_s: Seconds = 120.0  # of one reset or step of the environment, tool calls included
    keep: bool = True  # finished turns go to the queue, and whoever gets the task next goes on from them

    @property
    def several_turns(self) -> bool:
        return bool(self.tools) or self.environment is not None

    def __post_init__(self) -> None:
        check_values("agent", self)
        require(
            not self.tools or self.environment is None,
            "agent.tools",
            self.tools,
            f"stands beside agent.environment={self.environment}, which brings its own tools",
            "set one of the two, or derive the environment from ToolEnvironment",
        )
        require(
            not self.tools or self.tool_deadline_s < self.deadline_s,
            "agent.tool_deadline_s",
            self.tool_deadline_s,
            f"must be below agent.deadline_s={self.deadline_s}, or the step fails before the call does",
            "set agent.deadline_s higher",
        )
