"""Scores of the rollouts of a task, by the user's reward functions: one, or several at once.

    texts of a task ─┬▸ function "right" ── of each text, or of all at once ──▸ parts ─┐ joined ──▸ a Score each
                     └▸ function "style" ─────────────────────────────────────▸ parts ─┘

Each function has a deadline, retries and threads of its own (`reward_calls.py`); none waits for another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from asyncrl.config.schema import RewardConfig
from asyncrl.generator.scoring.reward_calls import (
    Arguments,
    Reward,
    RewardCall,
    RewardError,
    all_of,
    load_reward,
)
from asyncrl.generator.scoring.scores import NOTHING, Score, combined, score_of
from asyncrl.telemetry.status import LATE, UNDER_WAY, ProcessStatus
from asyncrl.types import Rollout, Task

__all__ = ["Reward", "RewardError", "Scorer"]

log = logging.getLogger(__name__)

MISSED_AFTER = 16
"""Answers scored before a warning about weights of parts that never came."""


class Scorer:
    """The reward functions of a process: that of `reward.function`, or those of `reward.functions` by name.

    With an empty mapping every rollout earns 0.
    """

    def __init__(self, function: Reward | Mapping[str, Reward], config: RewardConfig) -> None:
        functions = function if isinstance(function, Mapping) else {"": function}
        self._calls = [RewardCall(each, config.of(name), name) for name, each in functions.items()]
        self._weights = config.weights
        self._missed = set(config.weights)
        self._scored = self._zeroed = 0
        self._status = ProcessStatus()

    @staticmethod
    def from_config(config: RewardConfig) -> Scorer:
        """Raises ConfigError for a missing function, wrong options, and a class that cannot work on this machine."""
        if not config.functions:
            return Scorer(load_reward(config, "reward"), config)
        keys = {name: f"reward.functions.{name}" for name in config.functions}
        return Scorer({name: load_reward(config.of(name), key) for name, key in keys.items()}, config)

    def start(self, status: ProcessStatus | None = None) -> None:
        """Start the functions that have a `start()`, before the first call. status: gets a warning about weights of
        parts that never come."""
        self._status = status or self._status
        for call in self._calls:
            call.start()

    async def score(self, task: Task, text: str, rollout: Rollout) -> Score:
        """The score of one rollout, as a group of its own. Raises RewardError."""
        (score,) = await self.score_group(task, [text], [rollout])
        return score

    async def score_group(self, task: Task, texts: Sequence[str], rollouts: Sequence[Rollout]) -> list[Score]:
        """The scores of a task's rollouts. Raises RewardError if one fails and `on_failure` is 'drop'."""
        if not self._calls:
            return [NOTHING] * len(texts)
        by_function = await all_of(self._scores_by(call, task, texts, rollouts) for call in self._calls)
        try:
            scores = [combined(of_rollout) for of_rollout in zip(*by_function, strict=True)]
        except ValueError as error:
            raise RewardError(f"the rewards of task {task.ordinal}: {error}") from None
        for score, rollout in zip(scores, rollouts, strict=True):
            self._missed -= rollout.reward_parts.keys()  # those of an environment
            self._note_parts(score)
        return scores

    def stats(self) -> dict[str, float]:
        """reward/failures: failed calls, also by name where there are several functions · late/<function>:
        calls that took too long · under_way/<function>: calls that have begun and not ended · reward/zeroed:
        answers that a failed function gave 0 · reward/missed_weights: weights of parts that no answer had so far."""
        return {
            "reward/failures": sum(call.failures for call in self._calls),
            **{f"reward/failures/{call.name}": call.failures for call in self._calls if call.name},
            **{
                f"{UNDER_WAY}{call.config.function}": call.under_way
                for call in self._calls
                if call.late or call.under_way
            },
            **{f"{LATE}{call.config.function}": call.late for call in self._calls if call.late},
            "reward/zeroed": self._zeroed,
            "reward/missed_weights": len(self._missed),
        }

    def close(self) -> None:
        """Does not wait for calls that hang."""
        with ExitStack() as closing:
            for call in self._calls:
                closing.callback(call.close)

    async def _scores_by(
        self, call: RewardCall, task: Task, texts: Sequence[str], rollouts: Sequence[Rollout]
    ) -> Sequence[Score]:
        """The scores of one function. A task has failed if it is dropped, or if all its calls fail and count as 0."""
        failures: list[RewardError] = []
        try:
            scores = await self._calls_by(call, task, texts, rollouts, failures)
        except RewardError as error:
            call.note(task, error)
            raise
        all_failed = call.config.per == "group" or len(failures) == len(texts)
        call.note(task, failures[-1] if failures and all_failed else None)
        return scores

    async def _calls_by(
        self,
        call: RewardCall,
        task: Task,
        texts: Sequence[str],
        rollouts: Sequence[Rollout],
        failures: list[RewardError],
    ) -> Sequence[Score]:
        """failures: gets those that count as 0."""
        read = partial(score_of, weights=self._weights, name=call.name)
        if call.config.per == "group":
            whole, each = Arguments(task, list(texts), list(rollouts)), partial(_each, texts=texts, read=read)
            scoring = call.result(call.begin(whole, each), whole, each)
            return await self._or_zero(call, scoring, [NOTHING] * len(texts), failures)
        answers = [
            (Arguments(task, text, rollout), partial(read, text=text))
            for text, rollout in zip(texts, rollouts, strict=True)
        ]
        firsts = [call.begin(*answer) for answer in answers]
        in_threads = [first for first in firsts if first is not None]
        try:
            if in_threads:
                await asyncio.wait(in_threads, return_when=asyncio.FIRST_EXCEPTION)
                if all(first.done() and not first.exception() for first in in_threads):
                    return [first.result() for first in in_threads]
            return await all_of(
                self._or_zero(call, call.result(first, *answer), NOTHING, failures)
                for first, answer in zip(firsts, answers, strict=True)
            )
        finally:
            for first in in_threads:
                if not first.cancel() and not first.cancelled():
                    first.exception()  # asyncio warns of those that nobody has looked at

    async def _or_zero(self, call: RewardCall, scoring: Any, zero: Any, failures: list[RewardError]) -> Any:
        """The result of `scoring`; `zero` if it fails and the function's `on_failure` is 'zero'."""
        try:
            return await scoring
        except RewardError as error:
            if call.config.on_failure != "zero":
                raise
            log.warning("%s; it counts as 0", error)
            failures.append(error)
            self._zeroed += len(zero) if isinstance(zero, list) else 1
            return zero

    def _note_parts(self, score: Score) -> None:
        self._missed -= score.parts.keys()
        self._scored += 1
        if self._missed and self._scored == MISSED_AFTER:
            missed, parts = ", ".join(sorted(self._missed)), ", ".join(sorted(score.parts))
            had = f"{self._scored} answers had no such part; the last one had {parts}"
            self._status.warning = f"reward.weights names {missed}, but {had}"
            log.warning("%s", self._status.warning)


def _each(values: Any, texts: Sequence[str], read: Any) -> list[Score]:
    """Raises ValueError unless there is a value for each text."""
    if len(values) != len(texts):
        raise ValueError(f"{len(values)} values for {len(texts)} texts")
    return [read(value, text=text) for value, text in zip(values, texts, strict=True)]
