"""The reward functions of a pool: they add to the rewards of a group, and drop groups without anything to learn."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from asyncrl.config.schema import Config
from asyncrl.generator.rollouts import answer_numbers
from asyncrl.generator.scoring.reward_calls import all_of
from asyncrl.generator.scoring.rewards import RewardError, Scorer
from asyncrl.generator.scoring.scores import FILTERED, Score, passes_filter
from asyncrl.pool.worker import AddColumns, LeftOut, PoolWork
from asyncrl.queue.wire.columns import REWARDS
from asyncrl.queue.wire.payload import PART
from asyncrl.types import ANSWER, EVAL, TRAIN, UNSCORED, Array, Group, Rollout, Task

log = logging.getLogger(__name__)

REWARD = "reward"
"""The drop reason of groups that a function failed at."""


class Scoring(PoolWork):
    """`PoolWork` of the pool of rewards. These functions add to the reward that a group came with.

    held_out: the tasks of each set of `evaluation`, in their order
    """

    concurrency = 16  # each function has workers of its own

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        held_out: Mapping[str, Sequence[Task]],
    ) -> None:
        self._scorer, self._tokenizer, self._config, self._held_out = scorer, tokenizer, config, held_out

    @property
    def streams(self) -> Mapping[str, AddColumns]:
        return {TRAIN: self.columns, EVAL: self.evaluate}

    def stats(self) -> Mapping[str, float]:
        """As `Scorer.stats`."""
        return self._scorer.stats()

    async def columns(self, group: Group) -> Mapping[str, Array]:
        """Raises LeftOut for a group that a function fails at, and for one that `algorithm.filter` drops."""
        try:
            scores = await self._scores(group.task, [*group.rollouts()])
        except RewardError as error:
            raise LeftOut(REWARD, str(error)) from None
        if any(score.steps is not None for score in scores):
            raise LeftOut(REWARD, "functions of a pool cannot score steps: those of the generators can")
        scored = _with_scores(group, scores)
        if not passes_filter(scored, self._config):
            raise LeftOut(FILTERED)
        return _columns(scored)

    async def evaluate(self, group: Group) -> Mapping[str, Array]:
        """Score a chunk of held-out tasks. A task that a function fails at counts as 0, as in `Rollouts.evaluate`."""
        data, rollouts = group.task.data, [*group.rollouts()]
        tasks = self._held_out[str(data["set"])][int(data["start"]) : int(data["stop"])]
        samples = len(rollouts) // len(tasks)
        of_tasks = [rollouts[i * samples : (i + 1) * samples] for i in range(len(tasks))]
        several = await all_of(self._evaluated(*each) for each in zip(tasks, of_tasks, strict=True))
        return _columns(_with_scores(group, [score for scores in several for score in scores]))

    async def _evaluated(self, task: Task, rollouts: Sequence[Rollout]) -> list[Score]:
        if any(rollout.reward_parts.get(UNSCORED) for rollout in rollouts):
            # A generator could not answer it, or not score it.
            return [_unscored(rollout) for rollout in rollouts]
        try:
            scores = await self._scores(task, rollouts)
        except RewardError as error:
            log.warning("held-out task %d counts as 0: %s", task.ordinal, error)
            return [_unscored(rollout) for rollout in rollouts]
        answers = [score.answer for score in scores]
        if not any(answers) or any(ANSWER in rollout.reward_parts for rollout in rollouts):
            return scores
        numbers = answer_numbers(answers)
        return [
            dataclasses.replace(score, parts={**score.parts, ANSWER: number})
            for score, number in zip(scores, numbers, strict=True)
        ]

    async def _scores(self, task: Task, rollouts: Sequence[Rollout]) -> list[Score]:
        """Raises RewardError."""
        scores = await self._scorer.score_group(task, [*map(self._text, rollouts)], rollouts)
        for rollout, score in zip(rollouts, scores, strict=True):
            if twice := rollout.reward_parts.keys() & score.parts.keys():
                raise RewardError(f"task {task.ordinal}: generator and pool both give {sorted(twice)}")
        return scores

    def _text(self, rollout: Rollout) -> str:
        """The last turn of the policy: the text after the last token that it did not make."""
        others = np.flatnonzero(rollout.loss_mask == 0)
        last_turn = rollout.token_ids[others[-1] + 1 :] if others.size else rollout.token_ids
        return str(self._tokenizer.decode(last_turn, skip_special_tokens=True))


def _unscored(rollout: Rollout) -> Score:
    """The score that cancels the reward of the generator."""
    return Score(-rollout.reward, {UNSCORED: 1.0})


def _with_scores(group: Group, scores: Sequence[Score]) -> Group:
    """A part that some rollout lacks counts as 0 there."""
    names = {name for score in scores for name in score.parts}
    parts = {name: _array(score.parts.get(name, 0.0) for score in scores) for name in names}
    rewards = group.rewards + _array(score.reward for score in scores)
    return dataclasses.replace(group, rewards=rewards, reward_parts={**group.reward_parts, **parts})


def _columns(group: Group) -> dict[str, Array]:
    parts = {f"{PART}{name}": part_n for name, part_n in group.reward_parts.items()}
    return {REWARDS: group.rewards, **parts}


def _array(values: Iterable[float]) -> Array:
    """[n] float32."""
    return np.array([*values], np.float32)
