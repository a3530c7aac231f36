"""A policy that says what a script tells it, tools and environments for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from chat_cases import letters, tokenizer
from transformers import PreTrainedTokenizerFast

from asyncrl.config.schema import ModelConfig
from asyncrl.config.sections.agent import AgentConfig
from asyncrl.generator.agents.agent import Agent
from asyncrl.generator.agents.chat import Chat, Message
from asyncrl.generator.agents.env import Action, Environment, Observation, ToolEnvironment
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.models.prompts import ImageReader
from asyncrl.types import Sampling, Task, Turn

TASK = Task(3, "the product of 12 and 34", {"answer": "408"})
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>'
SAMPLING = Sampling(temperature=1.0, max_tokens=200, seed=5)

Policy = Callable[[str], str]
"""What has been said so far, control tokens spelled out → the next turn."""


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


def calculating(so_far: str) -> str:
    return "the answer is 408" if "<tool_response>" in so_far else CALL


@dataclass
class Speaker:
    """Says each turn letter by letter, which no tokenizer would; a version newer with each request.

    interrupt  tokens after which the k-th request is interrupted
    """

    policy: Policy
    tok: PreTrainedTokenizerFast = field(default_factory=lambda: tokenizer("merges"))
    interrupt: Sequence[int] = ()
    asked: list[SampleRequest] = field(default_factory=list)
    version: int = 0
    newer: int = 1

    async def sample(self, request: SampleRequest) -> list[Turn]:
        interrupted = len(self.asked) < len(self.interrupt)
        most = self.interrupt[len(self.asked)] if interrupted else request.sampling.max_tokens
        self.asked.append(request)
        opened = "<|im_start|>assistant\n"
        before, _, begun = self.tok.decode(request.prompt_ids, skip_special_tokens=False).rpartition(opened)
        words = self.policy(before).removeprefix(begun)
        ids = [*letters(self.tok, words), self.tok.eos_token_id]
        made = np.array(ids[: min(most, request.sampling.max_tokens)], np.int64)
        version, self.version = self.version, self.version + self.newer
        finish = "stop" if len(made) == len(ids) else "abort" if interrupted else "length"
        logprobs = -np.arange(1, len(made) + 1, dtype=np.float32) / 8
        return [request.turn(made, logprobs, np.full(len(made), version, np.int32), finish)]


def agent(
    speaker: Any,
    make: Callable[[], Environment] | None = None,
    max_length: int = 2000,
    sampler: Any = None,
    model: ModelConfig | None = None,
    **config: Any,
) -> Agent:
    chosen = AgentConfig(environment="unused:Unused", **config)
    make = make or (lambda: ToolEnvironment([multiply]))
    images = ImageReader(model or ModelConfig(path="no/model"))
    return Agent(sampler or speaker, Chat(speaker.tok), make, images, chosen, max_length=max_length)


class Counting(Environment):
    """Says how many turns it has seen, pays 0.5 for each; done at `turns`. drift: what it says is new each time."""

    seen = 0

    def __init__(self, turns: int = 3, drift: bool = False) -> None:
        super().__init__()
        self._turns, self._drift, self._count = turns, drift, 0

    async def reset(self, task: Task) -> Sequence[Message]:
        self._count = 0
        return [{"role": "user", "content": str(task.prompt)}]

    async def step(self, action: Action) -> Observation:
        self._count += 1
        Counting.seen += 1
        says = f"turn {Counting.seen if self._drift else self._count}"
        return Observation(
            [{"role": "user", "content": says}],
            reward={"alive": 0.5},
            done=self._count == self._turns,
            state=self._count,
        )
