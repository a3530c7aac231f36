"""The files in which a learner records its run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.learner.reporting import report
from asyncrl.learner.reporting.evaluation import PREFIX, Evaluation
from asyncrl.learner.reporting.rollout_log import RolloutLog
from asyncrl.learner.reporting.utilization import Utilization
from asyncrl.queue.protocol.replies import Trained
from asyncrl.telemetry.sinks import JsonlSink, Sinks, read_rows
from asyncrl.telemetry.trackers import TRACKERS, TrackedRun
from asyncrl.types import Group, Version


class RunRecords:
    """Written by rank 0 alone; on other ranks nothing is opened, and every method does nothing.

    metrics.jsonl   a row per version, and one per evaluation; the same rows go to `telemetry.sinks`
    rollouts.jsonl  rollouts as text, where `telemetry.rollouts_every` is set
    summary.json    the run as a whole, written at its end
    """

    def __init__(self, run_folder: Path, config: Config) -> None:
        self.folder, self._config, self._path = run_folder, config, run_folder / report.ROWS
        self.utilization = Utilization(config)
        self._started = time.monotonic()
        self._generators = report.GeneratorTotals()
        self._rows: Sinks | None = None
        self._rollouts: RolloutLog | None = None

    def open(self, version: Version) -> None:
        """Begin the files. version: of the policy; rows of later versions are cut off where a run is resumed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / report.SUMMARY).unlink(missing_ok=True)  # the run is going on again
        resume_at = version if self._config.run.resume else None
        run = TrackedRun(self._config.run.name, self.folder, resume_at, dataclasses.asdict(self._config))
        trackers = (TRACKERS[name](run) for name in self._config.telemetry.sinks)
        self._rows = Sinks([JsonlSink(self._path, resume_at), *trackers])
        if self._config.telemetry.rollouts_every:
            self._rollouts = RolloutLog(self.folder, self._config, resume_at)

    def last_version(self, default: Version) -> Version:
        """The newest version that has a row."""
        return max((row["version"] for row in read_rows(self._path)), default=default)

    def evaluated(self) -> set[Version]:
        """The versions whose evaluation has a row."""
        return {row["version"] for row in read_rows(self._path) if any(key.startswith(PREFIX) for key in row)}

    def write_version(
        self,
        version: Version,
        trained: Trained,
        values: Mapping[str, float],
        spans: Mapping[str, float],
        rollouts: Sequence[Group],
    ) -> None:
        """The row of the step that published `version`, and some of the rollouts that it was trained on."""
        if self._rows is not None:
            generators = self._generators.update(trained.stats)
            self._rows.write(report.step_row(version, values, spans, trained.depth, generators))
        if self._rollouts is not None:
            self._rollouts.write(version, rollouts)

    def write_evaluation(self, evaluation: Evaluation) -> None:
        if self._rows is not None:
            self._rows.write({"version": evaluation.version, **evaluation.scores})

    def write_summary(self, ended: str, dropped: Mapping[str, int] | None) -> None:
        """Args: as of `report.summarise`."""
        wall_s = time.monotonic() - self._started
        summary = report.summarise(
            list(read_rows(self._path)),
            max_staleness=self._config.queue.max_staleness,
            wall_s=wall_s,
            ended=ended,
            dropped=dropped,
            began=time.time() - wall_s,
        )
        report.write_summary(self.folder, summary)

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
        if self._rollouts is not None:
            self._rollouts.close()
