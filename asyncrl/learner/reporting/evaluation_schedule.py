"""Which versions are evaluated, and what becomes of the results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from asyncrl.config.schema import Config
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.reporting.evaluation import ACCURACY, PARK_S, Evaluation, Evaluations
from asyncrl.learner.reporting.run_records import RunRecords
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import Version

log = logging.getLogger(__name__)


class EvaluationSchedule:
    """Starts an evaluation every `evaluation.every` versions, and writes the results into the records.

    Args:
        evaluations: None where there are no held-out tasks, and on ranks other than 0: nothing is evaluated then.
        evaluated: Versions that were evaluated before the run was resumed.
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

    def finish(self, backend: Backend, status: ProcessStatus, stopping: Callable[[], bool]) -> None:
        """Collective: wait for pending evaluations, for `learner.groups_deadline_s` at most.

        All ranks wait together: a rank that waited alone would outlast the others' collectives.
        """
        deadline_s = self._config.learner.groups_deadline_s
        until = time.monotonic() + deadline_s

        def pending() -> bool:
            return self._evaluations is not None and bool(self._evaluations.pending) and not stopping()

        with status.waiting("the last evaluation from the generators", deadline_s):
            while backend.exchange(pending() and time.monotonic() < until)[0]:
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
