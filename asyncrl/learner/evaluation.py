"""Evaluation beside the stream: held-out tasks of a pinned version, in chunks, answered whenever generators
get to it.

    start(v) ─▸ chunks [0, 250) [250, 500) with min_version v ─▸ queue, stream "eval" ─▸ generators
    poll()   ◂─ finished chunks; an evaluation is whole when every held-out task has its reward

The learner never waits for one, except for the last.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from asyncrl.learner.ports import LearnerClient
from asyncrl.types import Group, Task, Version

EVAL = "eval"
PARK_S = 0.5
"""Of one poll, where the learner has nothing else to do."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """accuracy: the mean reward of the held-out tasks, greedy, under the policy of `version` (or a newer one,
    if the generators had moved on before they began)."""

    version: Version
    accuracy: float


@dataclass(slots=True)
class _Open:
    """An evaluation under way: the chunks that are in, by their start, as (sum of rewards, tasks)."""

    chunks: dict[int, tuple[float, int]] = field(default_factory=dict)

    @property
    def tasks(self) -> int:
        return sum(count for _, count in self.chunks.values())

    @property
    def reward(self) -> float:
        return sum(total for total, _ in self.chunks.values())


class Evaluations:
    """All evaluations of a run, on learner rank 0. heldout: number of held-out tasks."""

    def __init__(self, client: LearnerClient, learner_epoch: int, heldout: int, chunk: int) -> None:
        self._client, self._learner_epoch = client, learner_epoch
        self._heldout, self._chunk = heldout, chunk
        self._open: dict[Version, _Open] = {}
        self._unsent: deque[tuple[Version, int, int]] = deque()

    @property
    def pending(self) -> list[Version]:
        """Versions whose evaluation is not whole yet."""
        return list(self._open)

    def start(self, version: Version) -> None:
        """Ask for an evaluation of `version`, which must have been published."""
        self._open[version] = _Open()
        for start in range(0, self._heldout, self._chunk):
            self._unsent.append((version, start, min(start + self._chunk, self._heldout)))
        self._send()

    def poll(self, wait_s: float = 0.0) -> list[Evaluation]:
        """Evaluations that became whole."""
        self._send()
        if not self._open:
            return []
        groups = self._client.collect(EVAL, learner_epoch=self._learner_epoch, wait_s=wait_s)
        return [whole for group in groups if (whole := self._take(group)) is not None]

    def _send(self) -> None:
        while self._unsent:
            ordinal, room = self._client.room(EVAL, wait_s=0.0)
            if room <= 0:
                return
            version, start, stop = self._unsent.popleft()
            data = {"version": version, "start": start, "stop": stop}
            self._client.submit(EVAL, [Task(ordinal, "", data)], min_version=version)

    def _take(self, group: Group) -> Evaluation | None:
        version, start = int(group.task.data["version"]), int(group.task.data["start"])
        evaluation = self._open.get(version)
        if evaluation is None:
            return None
        evaluation.chunks[start] = (float(group.rewards.sum()), len(group.rewards))
        if evaluation.tasks < self._heldout:
            return None
        del self._open[version]
        return Evaluation(version, evaluation.reward / evaluation.tasks)
