"""From rows to examples, each a rollout whose tokens under the mask are learned.

    {"prompt", "target"}                 the prompt, and the target with its end token
    {"prompt": [messages …]}             a conversation that ends with the assistant (`conversations.py`)
    {"prompt", "target": [texts …]}      each turn in the environment of the run, which answers it (`Demonstration`)
    {"prompt", "chosen", "rejected"}     a pair: two segments, the chosen answer and the rejected one

An answer of a pair is a text, or the messages that follow the prompt. The mask of a pair covers the tokens of each
answer; for a reward model the one token behind it, whose output is the score of all that stands before.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from asyncrl.config.schema import Config
from asyncrl.errors import TaskError
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.gateway.harness import load_player
from asyncrl.generator.scoring.reward_calls import all_of
from asyncrl.models.prompts import ImageReader, encode_prompt
from asyncrl.offline.conversations import ASSISTANT, Conversations, trained
from asyncrl.offline.objectives import TARGET
from asyncrl.rewards.classifier import answer_ids
from asyncrl.types import Prompt, Rollout, Sampling, Task, Turn

CHOSEN, REJECTED, MARGIN = "chosen", "rejected", "margin"

Make = Callable[[Sequence[Task]], list[Rollout]]


def check_demonstrated(task: Task, several_turns: bool = False) -> None:
    """Raises TaskError unless supervised training can learn from the row."""
    target = task.data.get("target")
    if several_turns:
        if not isinstance(target, list) or not all(isinstance(turn, str) for turn in target):
            raise TaskError(
                "has no list of texts under 'target', one a turn, which supervised training needs"
            )
    elif target is None and isinstance(task.prompt, list):
        if task.prompt[-1]["role"] != ASSISTANT:
            raise TaskError("has no 'target', and its messages do not end with one of the assistant")
    elif not isinstance(target, str):
        raise TaskError("has no 'target' text, which supervised training needs")


def check_pair(task: Task) -> None:
    """Raises TaskError unless the row has two answers to prefer one of."""
    for name in (CHOSEN, REJECTED):
        answer = task.data.get(name)
        if not (isinstance(answer, str) or _is_answer(answer)):
            raise TaskError(
                f"has no {name!r} answer: a text, or messages of which the last is the assistant's"
            )
        if isinstance(task.prompt, str) and not isinstance(answer, str):
            raise TaskError(f"has messages under {name!r}, and a text under 'prompt'")
    if task.data[CHOSEN] == task.data[REJECTED]:
        raise TaskError("has equal answers under 'chosen' and 'rejected'")
    margin = task.data.get(MARGIN)
    if margin is not None and (not isinstance(margin, int | float) or not 0 <= margin < float("inf")):
        raise TaskError(f"has a 'margin' of {margin!r}, which is no number from 0 on")


def _is_answer(answer: Any) -> bool:
    messages = isinstance(answer, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one for one in answer
    )
    return messages and bool(answer) and answer[-1]["role"] == ASSISTANT


@dataclasses.dataclass(frozen=True, slots=True)
class Examples:
    """Makes examples of tasks, which are checked."""

    tokenizer: PreTrainedTokenizerBase
    images: ImageReader
    config: Config

    def demonstrated(self, task: Task) -> Rollout:
        """The target as a turn of the policy, or a conversation. Raises TaskError."""
        target = task.data.get("target")
        if isinstance(target, str):
            return self._answered(task, target)
        return self._conversations.rollout(task.prompt, tools=task.data.get("tools") or ())  # type: ignore[arg-type]

    def preferred(self, task: Task) -> Rollout:
        """Two answers of the policy. Raises TaskError."""
        return Rollout.from_segments([self._answered(task, task.data[name]) for name in (CHOSEN, REJECTED)])

    def compared(self, task: Task) -> Rollout:
        """Two texts for a scoring network, in the form in which `rewards/classifier.py` gives them to it. The row's
        margin is the target. Raises TaskError."""
        texts = [
            np.array(answer_ids(self.tokenizer, task.prompt, task.data[name]), np.int64)
            for name in (CHOSEN, REJECTED)
        ]
        pair = Rollout.from_segments([_scored(ids) for ids in texts])
        return dataclasses.replace(pair, reward_parts={TARGET: float(task.data.get(MARGIN) or 0.0)})

    def _answered(self, task: Task, answer: Any) -> Rollout:
        if not isinstance(answer, str):
            assert isinstance(task.prompt, list)
            found = self._conversations.rollout([*task.prompt, *answer], first=len(task.prompt))
            if "segment" in found.columns:
                raise TaskError("has an answer whose earlier turns the chat template rewrites")
            return found
        prompt = self.images.prompt(
            task, encode_prompt(self.tokenizer, task, self.config.tasks.chat_template_kwargs)
        )
        said = [*self.tokenizer.encode(answer, add_special_tokens=False), self.tokenizer.eos_token_id]
        whole = Prompt(np.concatenate([prompt.ids, np.array(said, np.int64)]), prompt.media)
        return trained(whole, np.repeat(np.array([0, 1], np.int8), [len(prompt.ids), len(said)]))

    @property
    def _conversations(self) -> Conversations:
        return Conversations(self.tokenizer, self.images, self.config.tasks.chat_template_kwargs)


def _scored(ids: np.ndarray) -> Rollout:
    """A text with one token more, which is under the mask alone: any token does, as no output is of itself."""
    mask = np.zeros(len(ids) + 1, np.int8)
    mask[-1] = 1
    return trained(Prompt(np.append(ids, ids[-1:])), mask)


def one_by_one(make: Callable[[Task], Rollout], place: Callable[[int], str]) -> Make:
    """A function that makes examples, and names the place of the row in errors."""

    def made(task: Task) -> Rollout:
        try:
            return make(task)
        except TaskError as error:
            raise TaskError(f"{place(task.ordinal)}: {error}") from error

    return lambda tasks: [made(task) for task in tasks]


@contextmanager
def demonstrations(tokenizer: PreTrainedTokenizerBase, config: Config) -> Iterator[Make]:
    """A function that makes examples of several turns, in environments that end with it."""
    demonstration = Demonstration(tokenizer, config)
    with asyncio.Runner() as loop:
        try:
            yield lambda tasks: loop.run(all_of(map(demonstration.rollout, tasks)))
        finally:
            loop.run(demonstration.close())


class Demonstration:
    """Makes rollouts whose turns are the task's targets, played in its environment without a policy."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: Config) -> None:
        self._tokenizer, self._weights = tokenizer, config.reward.weights
        self._turns: dict[int, list[str]] = {}
        agent = load_player(self, tokenizer, config)
        assert agent is not None
        self._agent = agent

    async def rollout(self, task: Task) -> Rollout:
        """Raises TaskError unless data['target'] is a list of texts, as many as the environment takes."""
        try:
            check_demonstrated(task, several_turns=True)
        except TaskError as error:
            raise TaskError(f"task {task.ordinal} {error}") from None
        self._turns[task.ordinal] = task.data["target"].copy()
        played = await self._agent.play(task, "demonstration", Sampling())
        if left := self._turns.pop(task.ordinal):
            raise TaskError(f"task {task.ordinal} was over before its last {len(left)} targets were said")
        return played.rollout(self._weights).without_steps()

    async def close(self) -> None:
        await self._agent.close()

    async def sample(self, request: SampleRequest) -> list[Turn]:
        """The next target, whole. See `Sampler`."""
        turns = self._turns[request.ordinal]
        if not turns:
            raise TaskError(f"task {request.ordinal} goes on after its last target")
        words = self._tokenizer.encode(turns.pop(0), add_special_tokens=False)
        ids = np.array([*words, self._tokenizer.eos_token_id], np.int64)
        zeros = np.zeros(len(ids))
        return [Turn(request.prompt_ids, ids, zeros.astype(np.float32), zeros.astype(np.int32), "stop")]
