"""Trackio: in TRACKIO_DIR, else its cache folder; TRACKIO_SPACE_ID sends to a Space. It has groups and no tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.telemetry.trackers.tracker import COLUMNS, ROLLOUTS, TrackedRun, Tracker


class TrackioTracker(Tracker):
    """Runs go by their names there: a resumed run goes on with the newest of its name. Tags and notes are settings.
    Rows of versions above `resume_at` stay there."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        about = {"tags": list(run.tags), "notes": run.notes}
        self._table = trackio.Table
        self._run = trackio.init(
            project=run.project_or("TRACKIO_PROJECT"),
            name=run.name,
            group=run.group,
            config=run.public_settings() | {name: value for name, value in about.items() if value},
            resume="never" if run.resume_at is None else "allow",
            embed=False,
        )

    def write(self, version: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=version)

    def write_rollouts(self, version: int, table: Sequence[Sequence[Any]]) -> None:
        rows = self._table(columns=list(COLUMNS), data=[list(row) for row in table])
        self._run.log({ROLLOUTS: rows}, step=version)

    def close(self) -> None:
        self._run.finish()
