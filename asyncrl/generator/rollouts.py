"""From a task to a scored group: prompt to ids, ids to samples, samples to text, text to reward.

    sample   task ──▸ engine ──▸ n turns, and a greedy one where the algorithm compares with it
    score    turns ──▸ text ──▸ reward function ──▸ Group: rewards, their parts, what the function says of steps

One sample that cannot be had fails its whole task; in an evaluation it counts as 0.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from asyncrl.config.schema import Config
from asyncrl.generator.engine import Engine, PromptTooLongError, SampleRequest
from asyncrl.generator.rewards import RewardError, Scorer
from asyncrl.generator.steps import step_columns, token_ends
from asyncrl.models import encode_prompt
from asyncrl.types import Array, Group, Rollout, Sampling, Task, Turn

log = logging.getLogger(__name__)

Result = TypeVar("Result")

NONE_I64, NONE_F32, NONE_I32 = np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Samples:
    """What the engine made of one task. greedy: not trained on, its reward is what the others are compared with."""

    turns: list[Turn]
    greedy: Turn | None = None


class Rollouts:
    """What one worker does with a task, apart from leases and weights."""

    def __init__(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, scorer: Scorer, config: Config
    ) -> None:
        self._engine, self._tokenizer, self._scorer = engine, tokenizer, scorer
        self._group_size, self._with_greedy = config.batch.group_size, config.greedy_rollout
        self._training = Sampling(
            temperature=config.generator.temperature,
            max_tokens=config.generator.max_tokens,
            seed=config.run.seed,
        )
        self._evaluation = Sampling(
            temperature=config.evaluation.temperature,
            max_tokens=config.evaluation.max_tokens or config.generator.max_tokens,
            seed=config.run.seed,
        )

    async def sample(self, task: Task, request_id: str) -> Samples:
        """batch.group_size turns, and a greedy one if `config.greedy_rollout`. Raises PromptTooLongError."""
        requests = [self._ask(task, request_id, self._training, self._group_size)]
        if self._with_greedy:
            greedy = replace(self._training, temperature=0.0)
            requests.append(self._ask(task, f"{request_id}/greedy", greedy))
        turns, *rest = await _all(requests)
        return Samples(turns, rest[0][0] if rest else None)

    async def score(self, task: Task, samples: Samples) -> Group:
        """The group of these samples.

        Raises RewardError if the reward of one cannot be had, or if only some of them have steps.
        """
        jobs = [self._rewarded(task, turn, steps=True) for turn in samples.turns]
        if samples.greedy is not None:
            jobs.append(self._rewarded(task, samples.greedy))
        rollouts = await _all(jobs)
        greedy_reward = None if samples.greedy is None else rollouts.pop().reward
        if len({bool(rollout.columns) for rollout in rollouts}) > 1:
            raise RewardError(
                f"the reward of task {task.ordinal} gave steps for some rollouts and not for others"
            )
        return Group.from_rollouts(task, self._training, rollouts, greedy_reward)

    async def evaluate(self, task: Task, held_out: Sequence[Task], request_id: str) -> Group:
        """One sample of each of these held-out tasks, as the group of `task`. What cannot be answered or scored
        counts as 0, with a warning: an accuracy over fewer tasks would be another number."""
        rollouts = await _all(self._evaluated(one, f"{request_id}/{one.ordinal}") for one in held_out)
        return Group.from_rollouts(task, self._evaluation, rollouts)

    async def answer(self, task: Task, request_id: str) -> str:
        """The text of one sample as in training. Raises PromptTooLongError."""
        (turn,) = await self._ask(task, request_id, self._training)
        return self._text(turn.output_ids)

    def stats(self) -> dict[str, float]:
        """What the worker reports of the reward function, see `Scorer.stats`."""
        return self._scorer.stats()

    def _ask(self, task: Task, request_id: str, sampling: Sampling, n: int = 1) -> Awaitable[list[Turn]]:
        prompt_ids = encode_prompt(self._tokenizer, task.prompt)
        return self._engine.sample(SampleRequest(request_id, prompt_ids, sampling, task.ordinal, n))

    async def _evaluated(self, task: Task, request_id: str) -> Rollout:
        try:
            (turn,) = await self._ask(task, request_id, self._evaluation)
        except PromptTooLongError as error:
            log.warning("held-out task %d counts as 0: %s", task.ordinal, error)
            prompt_ids = encode_prompt(self._tokenizer, task.prompt)
            return Rollout.from_turn(Turn(prompt_ids, NONE_I64, NONE_F32, NONE_I32, "length"))
        try:
            return await self._rewarded(task, turn)
        except RewardError as error:
            log.warning("held-out task %d counts as 0: %s", task.ordinal, error)
            return Rollout.from_turn(turn)

    async def _rewarded(self, task: Task, turn: Turn, steps: bool = False) -> Rollout:
        """steps: with the columns of the steps that the reward function tells of, if it does."""
        rollout = Rollout.from_turn(turn)
        text = self._text(turn.output_ids)
        score = await self._scorer.score(task, text, rollout)
        columns = {}
        if steps and score.steps is not None:
            ends_T = token_ends(self._text, turn.output_ids, text)
            columns = step_columns(score.steps, text, ends_T, len(rollout.token_ids))
        return replace(rollout, reward=score.reward, reward_parts=score.parts, columns=columns)

    def _text(self, ids: Array) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


async def _all(jobs: Iterable[Awaitable[Result]]) -> list[Result]:
    """Their results in order; the first failure ends the others."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
