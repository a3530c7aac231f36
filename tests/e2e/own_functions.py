"""Tasks and rewards of runs under test, in a file of their own: they are imported where nothing of the tests can be."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.generator.agents.chat import Message
from asyncrl.generator.agents.env import Action, Environment, Observation
from asyncrl.types import Rollout, Task


def reward_key(name: str) -> str:
    """The key that makes a function of this file the reward of a run."""
    return f"reward.function='{__file__}:{name}'"


LENGTH = reward_key("length")


def digit_sum(task: Task, text: str) -> float:
    """Depends on every token, and differs within a group."""
    return sum(int(c) for c in text if c.isdigit()) / 9


def half_flat(task: Task, text: str) -> float:
    """Every second task earns all its rollouts the same."""
    return 0.0 if task.ordinal % 2 else digit_sum(task, text)


def length(task: Task, text: str) -> float:
    """Of a model that can do nothing yet, answers differ in this."""
    return float(len(text))


async def late(task: Task, text: str) -> float:
    """Known a while after the answer, as from a judge: a synchronous run waits for it in each version."""
    await asyncio.sleep(0.1)
    return length(task, text)


def four_tasks() -> Iterator[dict[str, str]]:
    """Yields; the run ends with its last task."""
    for digit in range(6):
        yield {"prompt": f"{digit}+0=", "answer": str(digit)}


def half_right(task: Task, text: str) -> dict[str, float]:
    return {"length": len(text) / 100, "answer": float(text == task.data["answer"])}


def of_one_version(task: Task, text: str, rollout: Rollout) -> dict[str, float]:
    versions = rollout.versions[rollout.loss_mask != 0]
    return {"length": len(text) / 100, "one_version": float((versions == versions[0]).all())}


def squares() -> list[dict[str, str]]:
    return [{"prompt": f"{digit}*{digit}"} for digit in range(10)]


class ThreeTurns(Environment):
    """Writes into `folder`/said what it is told, and answers a second turn once there is `folder`/gate."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    async def reset(self, task: Task) -> Sequence[Message]:
        self._ordinal, self._said = task.ordinal, list[str]()
        return [{"role": "user", "content": str(task.prompt)}]

    async def step(self, action: Action) -> Observation:
        self._said.append(action.text)
        line = json.dumps({"pid": os.getpid(), "ordinal": self._ordinal, "said": self._said}) + "\n"
        with (self._folder / "said").open("a") as file:
            file.write(line)
        while len(self._said) == 2 and not (self._folder / "gate").exists():
            await asyncio.sleep(0.02)
        answer: Message = {"role": "user", "content": str(len(self._said))}
        return Observation([answer], reward=float(len(action.text)), done=len(self._said) == 3)


def misspelt(task: Task, text: str) -> float:
    return float(text == task.data["anwser"])
