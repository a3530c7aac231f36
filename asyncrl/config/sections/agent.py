"""The section `agent`: rollouts of several turns, environments, and programs that play them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.config.rules import Amount, Count, Port, Rule, Seconds, Section, Threads, key


@dataclass(frozen=True)
class GatewayConfig(Section):
    """Where a generator serves the policy to agent.program or agent.function."""

    host: str = key("127.0.0.1", "address that it listens on, and that programs connect to")
    port: Port = key(0, "0: a free one for each generator")
    remote: bool = key(
        False, "host may be reached from other machines: each rollout has a key, nothing is encrypted"
    )

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            self.host not in ("0.0.0.0", "::", ""),
            "host",
            "is no address that a program can connect to",
            "name the address by which programs reach this machine",
        )
        yield Rule(
            self.remote or self.host in ("127.0.0.1", "::1", "localhost"),
            "host",
            "can be reached from other machines",
            f"set {at}.host=127.0.0.1, or {at}.remote=true where the network is private",
        )


@dataclass(frozen=True)
class AgentConfig(Section):
    """Without tools, environment, program and function a rollout is one turn."""

    tools: list[str] = key(
        [],
        "'package.module:function' or 'file.py:function' each, plain or async; type hints and docstring tell "
        "the model how to call it",
    )
    environment: str | None = key(None, "in place of tools: 'package.module:Class', an Environment")
    options: dict[str, Any] = key({}, "keyword arguments of the environment")
    environment_processes: Amount = key(
        0,
        "processes of one generator that hold its environments, many each; 0: none, they share the event loop",
    )
    environment_python: str | None = key(
        None, "the interpreter of these processes, whose packages may differ; none: this one"
    )
    environment_retries: Amount = key(
        1,
        "new environments or programs of one rollout, with its turns, after failures; then the task is dropped",
    )
    program: str | None = key(
        None, "in place of tools and environment: the command of a program that calls the policy over HTTP"
    )
    function: str | None = key(
        None, "likewise: 'file.py:run', async def run(base_url, api_key, task), which may return a reward"
    )
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    tool_format: Literal["auto", "hermes", "llama3", "harmony", "json"] = key(
        "hermes", "of calls; Qwen3 writes hermes; auto: the parser that reads what the chat template writes"
    )
    tool_role: Literal["tool", "user"] = key("tool", "of the messages that hold what a tool returned")
    tool_deadline_s: Seconds = key(10.0, "of one call; a late one is an error message to the model")
    tool_workers: Threads = key(16, "calls at once in one generator")
    tool_chars: Count = key(8192, "most characters of one tool's answer, the rest is cut off")
    max_turns: Count = key(8, "turns of one rollout")
    max_tokens: Count | None = key(
        None, "of one segment of a rollout, with prompt and answers of tools; none: generator.max_length"
    )
    history: Count | None = key(
        None, "earlier turns, with the answers to them, that a turn reads behind the prompt; none: all"
    )
    history_thoughts: Literal["keep", "as_template"] = key(
        "keep",
        "of earlier turns: they stay as they were sampled; as_template: each prompt is rendered from the messages, as "
        "servers do it, and begins a segment where the chat template has changed what was read or sampled",
    )
    deadline_s: Seconds = key(
        120.0,
        "of one reset or step of the environment, tool calls included; of a program between two turns of the policy",
    )
    keep: bool = key(True, "finished turns go to the queue, and whoever gets the task next goes on from them")

    @property
    def several_turns(self) -> bool:
        return bool(self.tools) or self.environment is not None or self.harness is not None

    @property
    def harness(self) -> str | None:
        """The program or the function that plays the rollouts."""
        return self.program if self.program is not None else self.function

    @property
    def most_segments(self) -> int:
        """The most segments that one rollout can have: each has a turn."""
        return self.max_turns if self.several_turns else 1

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            not self.tools or self.environment is None,
            "tools",
            f"stands beside agent.environment={self.environment}, which brings its own tools",
            "set one of the two, or derive the environment from ToolEnvironment",
        )
        harness = "program" if self.program is not None else "function"
        names = {"tools", "environment", "history", "program", "function"} - {harness}
        beside = sorted(f"agent.{name}" for name in names if getattr(self, name))
        yield Rule(
            self.harness is None or not beside,
            harness,
            f"stands beside {' and '.join(beside)}",
            "set one of them: a program brings its own tools, and composes each prompt",
        )
        yield Rule(
            self.harness is None or self.history_thoughts == "keep",
            "history_thoughts",
            "is for tools and environments; the messages of a program are its own",
            "leave it out",
        )
        yield Rule(
            self.program is None or bool(_words(self.program)),
            "program",
            "is no command, or has a quotation mark without its second one",
            "write it as in a shell: agent.program='python my_agent.py'",
        )
        yield Rule(
            not self.environment_processes or self.environment is not None,
            "environment_processes",
            "are for an environment, and agent.environment is not set",
            "set agent.environment, or leave them out",
        )
        yield Rule(
            self.environment_python is None or self.environment_processes > 0,
            "environment_python",
            "has no processes to run",
            "set agent.environment_processes=4",
        )
        yield Rule(
            not self.tools or self.tool_deadline_s < self.deadline_s,
            "tool_deadline_s",
            f"must be below agent.deadline_s={self.deadline_s}, or the step fails before the call does",
            "set agent.deadline_s higher",
        )


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []
