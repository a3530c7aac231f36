"""Evaluation beside training: held-out tasks of a pinned version, in chunks, answered as generators have room.

    start(v) ─▸ chunks [0, 250) [250, 500) of each set with min_version v ─▸ queue, stream "eval" ─▸ generators
    poll()   ◂─ finished chunks; an evaluation is whole when every task of every set has its rewards

`EvaluationSchedule` decides which versions are evaluated and writes the results. Evaluations are returned in the order
of their versions: a later one waits for those before it. The learner waits for the last one alone.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.config.sections.tasks import EvaluationConfig
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.reporting.heldout import ACCURACY, PREFIX, Evaluation, of_group, scores
from asyncrl.learner.reporting.report import RunRecords
from asyncrl.queue.client.client import BlockingClient
from asyncrl.telemetry import tracing
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import EVAL, Array, Group, Task, Version

log = logging.getLogger(__name__)

PARK_S = 0.5
"""Longest wait of one poll, where the learner has nothing else to do."""

Chunk = tuple[str, int, int]
"""(name of the set, first task, task after the last)"""


@dataclass(slots=True)
class _Open:
    """An evaluation under way: the chunks that are missing, and (rewards, answers, unscored) of those that are in."""

    missing: set[Chunk]
    span: tracing.OpenSpan
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
        self._open[version] = _Open(
            set(self._chunks), tracing.begin("evaluation", "evaluate", version=version)
        )
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
        named: dict[str, float] = {}
        for name in self._sets:
            named |= self._of_set(name, evaluation)
        evaluation.span.end(named)
        return Evaluation(version, named)

    def _of_set(self, name: str, evaluation: _Open) -> dict[str, float]:
        of_set = [evaluation.done[chunk] for chunk in self._chunks if chunk[0] == name]
        rewards_TK, answers_TK, unscored_TK = (np.concatenate(parts) for parts in zip(*of_set, strict=True))
        prefix = f"{PREFIX}{name}/" if name else PREFIX
        made = scores(rewards_TK, answers_TK, unscored_TK, self._sets[name].pass_reward)
        return {prefix + key: value for key, value in made.items()}


def _chunks(sizes: Mapping[str, int], config: EvaluationConfig) -> Iterator[Chunk]:
    for name, chosen in config.named_sets.items():
        step = max(1, config.chunk // chosen.samples)
        for start in range(0, sizes[name], step):
            yield name, start, min(start + step, sizes[name])


class EvaluationSchedule:
    """Starts an evaluation every `evaluation.every` versions, and writes the results into the records.

    evaluations: None where there are no held-out tasks, and on ranks other than 0: nothing is evaluated then.
    evaluated: versions that were evaluated before the run was resumed.
    """

    def __init__(
        self,
        config: Config,
        records: RunRecords,
        evaluations: Evaluations | None,
        evaluated: Collection[Version],
    ) -> None:
        self._config, self._records, self._evaluations = config, records, evaluations
        self._evaluated = set(evaluated)
        self.target_reached = False  # run.target_accuracy

    def start_if_due(self, version: Version, last: bool = False) -> None:
        """Start the evaluation of a published version if it is due, as that of the last one always is; then `poll`."""
        due = last or version % self._config.evaluation.every == 0
        if self._evaluations is not None and due and version not in self._evaluated:
            self._evaluated.add(version)
            self._evaluations.start(version)
        self.poll()

    def poll(self, wait_s: float = 0.0) -> None:
        """Write the evaluations that have become complete."""
        if self._evaluations is not None:
            self._write(self._evaluations.poll(wait_s))

    def finish(
        self,
        backend: Backend,
        status: ProcessStatus,
        stopping: Callable[[], bool],
        idle: Callable[[], None],
    ) -> None:
        """Collective: wait for pending evaluations, for `learner.groups_deadline_s` at most. idle: called between waits

        All ranks wait together: a rank that waited alone would outlast the others' collectives.
        """
        deadline_s = self._config.learner.groups_deadline_s
        until = time.monotonic() + deadline_s

        def pending() -> bool:
            return self._evaluations is not None and bool(self._evaluations.pending) and not stopping()

        with status.waiting("the last evaluation from the generators", deadline_s):
            while backend.exchange(pending() and time.monotonic() < until)[0]:
                idle()
                self.poll(PARK_S)
        late = pending()
        self.write_rest()
        if late:
            log.warning("no result within %.0f s: an evaluation is missing", deadline_s)

    def write_rest(self) -> None:
        """Write the complete evaluations that wait for an older one."""
        if self._evaluations is not None:
            self._write(self._evaluations.rest())

    def _write(self, evaluations: Collection[Evaluation]) -> None:
        target = self._config.run.target_accuracy
        for evaluation in evaluations:
            self._records.write_evaluation(evaluation)
            if target is not None and evaluation.scores[ACCURACY] >= target:
                self.target_reached = True
