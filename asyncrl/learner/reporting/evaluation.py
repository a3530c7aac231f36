"""Evaluation beside training: held-out tasks of a pinned version, in chunks, answered as generators have room.

    start(v) ─▸ chunks [0, 250) [250, 500) of each set with min_version v ─▸ queue, stream "eval" ─▸ generators
    poll()   ◂─ finished chunks; an evaluation is whole when every task of every set has its rewards

Evaluations are returned in the order of their versions: a later one waits for those before it. The learner waits for
the last one alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncrl.config.sections.tasks import EvaluationConfig
from asyncrl.learner.reporting.heldout import of_group, scores
from asyncrl.queue.client.client import BlockingClient
from asyncrl.types import EVAL, Array, Group, Task, Version

PARK_S = 0.5
"""Longest wait of one poll, where the learner has nothing else to do."""

PREFIX = "heldout/"
"""Prefix of the metrics of an evaluation."""

ACCURACY = f"{PREFIX}accuracy"
"""The mean reward of the tasks of `evaluation.source`."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """scores: heldout/accuracy, heldout/pass@8, … (`heldout.scores`), of a set with a name heldout/<name>/accuracy, …;
    under the policy of `version` (or a newer one, if the generators had moved on before they began)."""

    version: Version
    scores: Mapping[str, float]


Chunk = tuple[str, int, int]
"""(name of the set, first task, task after the last)"""


@dataclass(slots=True)
class _Open:
    """An evaluation under way: the chunks that are missing, and (rewards, answers, unscored) of those that are in."""

    missing: set[Chunk]
    done: dict[Chunk, tuple[Array, Array, Array]] = field(default_factory=dict)


class Evaluations:
    """All evaluations of a run, on learner rank 0. sizes: number of held-out tasks of each set."""

    def __init__(
        self, client: BlockingClient, learner_epoch: int, sizes: Mapping[str, int], config: EvaluationConfig
    ) -> None:
        self._client, self._learner_epoch = client, learner_epoch
        self._sets, self._chunks = config.named_sets, list(_chunks(sizes, config))
        self._open: dict[Version, _Open] = {}
        self._whole: dict[Version, Evaluation] = {}
        self._unsent: deque[tuple[Version, Chunk]] = deque()

    @property
    def pending(self) -> list[Version]:
        """Versions whose evaluation was not returned yet."""
        return sorted([*self._open, *self._whole])

    def start(self, version: Version) -> None:
        """Request an evaluation of `version`, which must have been published."""
        self._open[version] = _Open(set(self._chunks))
        self._unsent.extend((version, chunk) for chunk in self._chunks)
        self._send()

    def poll(self, wait_s: float = 0.0) -> list[Evaluation]:
        """Evaluations that have become complete, up to the first incomplete version."""
        self._send()
        if not self._open:
            return []
        for group in self._client.collect(EVAL, learner_epoch=self._learner_epoch, wait_s=wait_s):
            if (whole := self._take(group)) is not None:
                self._whole[whole.version] = whole
        oldest = min(self._open, default=None)
        return self._out([version for version in self._whole if oldest is None or version < oldest])

    def rest(self) -> list[Evaluation]:
        """Complete evaluations behind an incomplete one, which will not be completed any more."""
        return self._out([*self._whole])

    def _out(self, versions: Sequence[Version]) -> list[Evaluation]:
        return [self._whole.pop(version) for version in sorted(versions)]

    def _send(self) -> None:
        while self._unsent:
            ordinal, room = self._client.room(EVAL, wait_s=0.0)
            if room <= 0:
                return
            version, (name, start, stop) = self._unsent.popleft()
            data = {"version": version, "set": name, "start": start, "stop": stop}
            self._client.submit(EVAL, [Task(ordinal, "", data)], min_version=version)

    def _take(self, group: Group) -> Evaluation | None:
        data = group.task.data
        version, chunk = int(data["version"]), (str(data["set"]), int(data["start"]), int(data["stop"]))
        evaluation = self._open.get(version)
        if evaluation is None or chunk not in evaluation.missing:
            return None
        evaluation.missing.remove(chunk)
        evaluation.done[chunk] = of_group(group, self._sets[chunk[0]].samples)
        if evaluation.missing:
            return None
        del self._open[version]
        return Evaluation(
            version, {key: value for name in self._sets for key, value in self._of_set(name, evaluation)}
        )

    def _of_set(self, name: str, evaluation: _Open) -> Iterator[tuple[str, float]]:
        of_set = [evaluation.done[chunk] for chunk in self._chunks if chunk[0] == name]
        rewards_TK, answers_TK, unscored_TK = (np.concatenate(parts) for parts in zip(*of_set, strict=True))
        prefix = f"{PREFIX}{name}/" if name else PREFIX
        made = scores(rewards_TK, answers_TK, unscored_TK, self._sets[name].pass_reward)
        for key, value in made.items():
            yield prefix + key, value


def _chunks(sizes: Mapping[str, int], config: EvaluationConfig) -> Iterator[Chunk]:
    for name, chosen in config.named_sets.items():
        step = max(1, config.chunk // chosen.samples)
        for start in range(0, sizes[name], step):
            yield name, start, min(start + step, sizes[name])
