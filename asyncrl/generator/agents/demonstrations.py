"""Demonstrations of several turns: a task's 'target' texts, played in its own environment without a policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from asyncrl.config.schema import Config
from asyncrl.errors import TaskError
from asyncrl.generator.agents.agent import Agent
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.types import Rollout, Sampling, Task, Turn


class Demonstration:
    """Makes rollouts whose turns are the task's targets, with the answers of its tools."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: Config) -> None:
        self._tokenizer, self._weights = tokenizer, config.reward.weights
        self._turns: dict[int, list[str]] = {}
        agent = Agent.from_config(self, tokenizer, config)
        assert agent is not None
        self._agent = agent

    async def rollout(self, task: Task) -> Rollout:
        """Raises TaskError unless data['target'] is a list of texts, as many as the environment takes."""
        target = task.data.get("target")
        if not isinstance(target, list) or not all(isinstance(turn, str) for turn in target):
            raise TaskError(
                f"task {task.ordinal} has no list of texts under 'target', one a turn, which supervised training needs"
            )
        self._turns[task.ordinal] = target.copy()
        played = await self._agent.play(task, "demonstration", Sampling())
        if left := self._turns.pop(task.ordinal):
            raise TaskError(f"task {task.ordinal} was over before its last {len(left)} targets were said")
        return replace(played.rollout(self._weights), columns={})

    async def sample(self, request: SampleRequest) -> list[Turn]:
        """The next target, whole. See `Sampler`."""
        turns = self._turns[request.ordinal]
        if not turns:
            raise TaskError(f"task {request.ordinal} goes on after its last target")
        words = self._tokenizer.encode(turns.pop(0), add_special_tokens=False)
        ids = np.array([*words, self._tokenizer.eos_token_id], np.int64)
        zeros = np.zeros(len(ids))
        return [Turn(request.prompt_ids, ids, zeros.astype(np.float32), zeros.astype(np.int32), "stop")]
