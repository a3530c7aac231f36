"""Weights & Biases: a run that a resumed run continues. WANDB_… variables set key, entity and mode."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from asyncrl.telemetry.trackers.tracker import COLUMNS, ROLLOUTS, KeptId, TrackedRun, Tracker


class WandbTracker(Tracker):
    """Rows of versions above `resume_at` stay there."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        kept = KeptId(run, "wandb")
        name = kept.known or secrets.token_hex(4)
        kept.keep(name)
        self._table = wandb.Table
        self._run = wandb.init(
            id=name,
            name=run.name,
            project=run.project_or("WANDB_PROJECT"),
            group=run.group,
            tags=list(run.tags) or None,
            notes=run.notes,
            dir=str(run.folder),
            config=run.public_settings(),
            resume="allow",
            settings=wandb.Settings(console="off"),  # it would stand between the process and its log
        )
        self._run.define_metric("*", step_metric="version")

    def write(self, version: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"version": version, **numbers})

    def write_rollouts(self, version: int, table: Sequence[Sequence[Any]]) -> None:
        rows = self._table(columns=list(COLUMNS), data=[list(row) for row in table])
        self._run.log({"version": version, ROLLOUTS: rows})

    def close(self) -> None:
        self._run.finish()


def kill_service() -> None:
    """Kill wandb's own process, for whose end this one would wait."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if "wandb" in child.name():
                child.kill()
