"""MLflow: at MLFLOW_TRACKING_URI, else in RUN/mlflow.db, with tables of rollouts in RUN/mlartifacts."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.telemetry.trackers.tracker import COLUMNS, ROLLOUTS, KeptId, TrackedRun, Tracker

AT_ONCE = 100
"""Most parameters of one request."""

LONGEST = 500
"""Characters of a parameter."""

NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


class MlflowTracker(Tracker):
    """Rows of versions above `resume_at` stay there; a chart has the newest value of a version."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        remote = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(remote or f"sqlite:///{run.folder.absolute() / 'mlflow.db'}")
        self._metric = Metric
        kept = KeptId(run, "mlflow")
        self._id = self._resumed(kept.known) or self._new(run, local=remote is None)
        kept.keep(self._id)

    def write(self, version: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(_name(name), value, now, version) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics)

    def write_rollouts(self, version: int, table: Sequence[Sequence[Any]]) -> None:
        rows = {"columns": list(COLUMNS), "data": [list(row) for row in table]}
        self._client.log_dict(self._id, rows, f"{ROLLOUTS}/{version:06}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def _resumed(self, known: str | None) -> str | None:
        """The run with this identifier, if the server has it."""
        from mlflow.exceptions import MlflowException

        if known is None:
            return None
        try:
            self._client.update_run(known, status="RUNNING")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return known

    def _new(self, run: TrackedRun, local: bool) -> str:
        from mlflow.entities import Param

        project = run.project_or("MLFLOW_EXPERIMENT_NAME")
        experiment = self._client.get_experiment_by_name(project)
        place = (run.folder.absolute() / "mlartifacts").as_uri() if local else None
        number = experiment.experiment_id if experiment else self._client.create_experiment(project, place)
        about = {"group": run.group, "mlflow.note.content": run.notes, **dict.fromkeys(run.tags, "true")}
        tags = {name: value for name, value in about.items() if value}
        made = self._client.create_run(number, run_name=run.name, tags=tags)
        params = [Param(_name(key), str(value)[:LONGEST]) for key, value in run.public_settings().items()]
        for begin in range(0, len(params), AT_ONCE):
            self._client.log_batch(made.info.run_id, params=params[begin : begin + AT_ONCE])
        return str(made.info.run_id)


def _name(name: str) -> str:
    """A name that MLflow takes.

    >>> _name("rollout/reward/part/right(x)"), _name("π/μ")
    ('rollout/reward/part/right_x_', 'π/μ')
    """
    return NOT_IN_NAMES.sub("_", name)
