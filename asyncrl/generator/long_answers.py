"""Answers of one turn that are kept while they are made, so that a generator that dies costs seconds of a long one.

    engine ─▸ piece of a sample ─▸ its trajectory ─▸ enough new tokens of the task ─▸ queue
    leased again ─▸ the trajectories as they were sent ─▸ one request for each sample that has not ended: the prompt and
                    its tokens so far, the rest of its tokens, its own draws from there on

The tokens keep the log-probs and versions that they were recorded with. The queue counts the task as old as the oldest
lease that contributed to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asyncrl.generator.agents.task_progress import TaskProgress
from asyncrl.generator.agents.trajectory import Trajectory
from asyncrl.generator.agents.trajectory_entries import ContextEntry, PolicyEntry, recorded_experts
from asyncrl.generator.engines.engine import Pieces, Sampler, SampleRequest
from asyncrl.generator.scoring.reward_calls import all_of
from asyncrl.types import Array, Prompt, Sampling, Task, Turn


def name_of(request_id: str, sampling: Sampling) -> str:
    """A name of its own for the greedy answer beside those in training."""
    return request_id if sampling.temperature > 0 else f"{request_id}/greedy"


@dataclass(frozen=True, slots=True)
class LongAnswers:
    """The answers of one process.

    every       generator.progress_tokens
    max_length  most tokens of prompt and answer
    """

    engine: Sampler
    every: int
    max_length: int

    async def sample(
        self,
        task: Task,
        request_id: str,
        prompt: Prompt,
        samplings: Sequence[tuple[Sampling, int]],
        progress: TaskProgress,
    ) -> list[Turn]:
        """The answers to a prompt, in order. samplings: each with the number of answers that are drawn by it.

        progress: has a trajectory for each answer, and keeps what is made of them.
        """
        answers = [_Answer.of(trajectory, prompt.ids) for trajectory in progress.trajectories]
        begun = any(answer.made for answer in answers)
        requests: list[Awaitable[list[Turn]]] = []
        for sampling, count in samplings:
            mine, answers = answers[:count], answers[count:]
            name = name_of(request_id, sampling)
            request = SampleRequest(name, prompt.ids, sampling, task.ordinal, count, media=prompt.media)
            if begun:
                requests += [self._rest(request, i, answer, progress) for i, answer in enumerate(mine)]
            else:
                requests.append(self._all(request, mine, progress))
        return [turn for turns in await all_of(requests) for turn in turns]

    async def _all(
        self, request: SampleRequest, answers: Sequence[_Answer], progress: TaskProgress
    ) -> list[Turn]:
        def take(sample: int, turn: Turn) -> None:
            self._keep(answers[sample], turn, progress)

        turns = await self.engine.sample(replace(request, pieces=Pieces(self.every, take)))
        for answer, turn in zip(answers, turns, strict=True):
            answer.keep(turn)
        return turns

    async def _rest(
        self, request: SampleRequest, index: int, answer: _Answer, progress: TaskProgress
    ) -> list[Turn]:
        """The answer with this index among those of the request."""
        so_far = answer.so_far(request)
        room = min(request.sampling.max_tokens, self.max_length - len(request.prompt_ids)) - answer.made
        if so_far.finish != "abort" or room <= 0:
            return [so_far if so_far.finish != "abort" else replace(so_far, finish="length")]
        rest = SampleRequest(
            f"{request.request_id}/{index}",
            np.concatenate([request.prompt_ids, so_far.output_ids]),
            replace(request.sampling, max_tokens=room),
            request.ordinal,
            place=request.ordinal * request.n + index,
            first=index,
            made=answer.made,
            pieces=Pieces(self.every, lambda _, turn: self._keep(answer, turn, progress)),
            media=request.media,
        )
        (turn,) = await self.engine.sample(rest)
        answer.keep(turn)
        return [answer.so_far(request)]

    def _keep(self, answer: _Answer, turn: Turn, progress: TaskProgress) -> None:
        answer.keep(turn)
        if turn.finish == "abort":
            progress.grown(self.every)


class _Answer:
    """One answer in its trajectory. made: tokens that came with the lease"""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory, self._entries = trajectory, len(trajectory.entries)
        self.made = len(trajectory.last_words)

    @staticmethod
    def of(trajectory: Trajectory, prompt_ids: Array) -> _Answer:
        """A trajectory of another prompt, or of several turns, begins anew."""
        prompt = trajectory.entries[0] if trajectory.entries else None
        known = isinstance(prompt, ContextEntry) and np.array_equal(prompt.ids, prompt_ids)
        if not known or not all(isinstance(piece, PolicyEntry) for piece in trajectory.entries[1:]):
            trajectory.clear()
            trajectory.add(ContextEntry(prompt_ids, 0))
        return _Answer(trajectory)

    def keep(self, turn: Turn) -> None:
        """The turn goes on from what came with the lease, and replaces its own earlier pieces."""
        self._trajectory.keep_first(self._entries)
        self._trajectory.add_turn(turn)

    def so_far(self, request: SampleRequest) -> Turn:
        """All pieces as one turn. finish: that of the last one; "abort" without any."""
        pieces = [entry for entry in self._trajectory.entries if isinstance(entry, PolicyEntry)]
        return request.turn(
            np.concatenate([np.empty(0, np.int64), *(piece.ids for piece in pieces)]),
            np.concatenate([np.empty(0, np.float32), *(piece.logprobs for piece in pieces)]),
            np.concatenate([np.empty(0, np.int32), *(piece.versions for piece in pieces)]),
            pieces[-1].finish if pieces else "abort",
            recorded_experts(self._trajectory.segments()),
        )
