"""From a task to a scored group: prompt to ids, ids to samples, samples to text, text to reward."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from asyncrl.config.schema import Config
from asyncrl.generator.engine import Engine, PromptTooLongError, SampleRequest
from asyncrl.generator.rewards import RewardError, Scorer
from asyncrl.models import encode_prompt
from asyncrl.types import Group, Rollout, Sampling, Task, Turn

log = logging.getLogger(__name__)

NONE_I64, NONE_F32, NONE_I32 = np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int32)


class Rollouts:
    """What one worker does with a task, apart from leases and weights."""

    def __init__(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, scorer: Scorer, config: Config
    ) -> None:
        self._engine, self._tokenizer, self._scorer = engine, tokenizer, scorer
        self._group_size = config.batch.group_size
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

    async def sample(self, task: Task, request_id: str, n: int | None = None) -> list[Turn]:
        """n samples as in training; none: batch.group_size. Raises PromptTooLongError."""
        return await self._engine.sample(
            SampleRequest(
                request_id,
                encode_prompt(self._tokenizer, task.prompt),
                self._training,
                task.ordinal,
                n or self._group_size,
            )
        )

    async def score(self, task: Task, turns: Sequence[Turn]) -> Group:
        """The group of these samples. Raises RewardError if the reward of one cannot be had."""
        rollouts = await _all(self._rewarded(task, turn) for turn in turns)
        return Group.from_rollouts(task, self._training, rollouts)

    async def evaluate(self, task: Task, held_out: Sequence[Task], request_id: str) -> Group:
        """One sample of each of these held-out tasks, as the group of `task`. What cannot be answered or scored
        counts as 0, with a warning: an accuracy over fewer tasks would be another number."""
        rollouts = await _all(self._evaluated(one, f"{request_id}/{one.ordinal}") for one in held_out)
        return Group.from_rollouts(task, self._evaluation, rollouts)

    async def _evaluated(self, task: Task, request_id: str) -> Rollout:
        prompt_ids = encode_prompt(self._tokenizer, task.prompt)
        request = SampleRequest(request_id, prompt_ids, self._evaluation, task.ordinal)
        try:
            (turn,) = await self._engine.sample(request)
        except PromptTooLongError as error:
            log.warning("held-out task %d counts as 0: %s", task.ordinal, error)
            return Rollout.from_turn(Turn(prompt_ids, NONE_I64, NONE_F32, NONE_I32, "length"))
        try:
            return await self._rewarded(task, turn)
        except RewardError as error:
            log.warning("held-out task %d counts as 0: %s", task.ordinal, error)
            return Rollout.from_turn(turn)

    async def _rewarded(self, task: Task, turn: Turn) -> Rollout:
        rollout = Rollout.from_turn(turn)
        text = str(self._tokenizer.decode(turn.output_ids, skip_special_tokens=True))
        parts = await self._scorer.score(task, text, rollout)
        return replace(rollout, reward=sum(parts.values()), reward_parts=parts)


async def _all(jobs: Iterable[Coroutine[Any, Any, Rollout]]) -> list[Rollout]:
    """Their results in order; the first failure ends the others."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
