"""The files of one run, read as they grow; and how the run stands by them.

metrics.jsonl ─▸ MetricRows · trace/ ─▸ Timeline · rollouts.jsonl ─▸ the newest rollouts · config.yaml · summary.json
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from asyncrl.observability.rows import ROLLOUTS, MetricRows, NewestRows, RowTail, number
from asyncrl.observability.timeline import SILENT_S, Event, Timeline, shown_name
from asyncrl.system.disk import open_to_read

MOST_ROLLOUTS = 5000
"""Newest rollouts that are kept, with at most ROLLOUT_BYTES of their lines; they take about three times as much."""

ROLLOUT_BYTES = 64 << 20

WITHOUT_TEXT = ("version", "versions", "tokens", "reward")

MOST_BYTES = 1 << 20
"""Of a configuration or summary that is read."""

ALIVE_S = 15.0
"""A run without a sign of life for so long is silent."""

LEAVES_S = 60.0
"""Processes of a run that is over leave within so many seconds of its summary."""

RUNNING, SILENT = "running", "silent"

ROUTINE = frozenset({"published", "flip", "claim", "checkpoint", "subscribed", "unsubscribed"})
"""Events of each version and of each flip."""


class RunFiles:
    """texts: whether rollouts are kept with their texts."""

    def __init__(self, folder: Path, texts: bool = False) -> None:
        self.folder = folder.resolve()
        self.name = shown_name(self.folder.name)
        self.metrics = MetricRows(self.folder)
        self.timeline = Timeline(self.folder)
        self.rollout_rows = NewestRows(MOST_ROLLOUTS, ROLLOUT_BYTES)
        self._texts, self._rollouts = texts, RowTail(self.folder / ROLLOUTS)
        self._replaced = 0
        self._config: tuple[float, dict[str, Any]] = (0.0, {})

    def read(self) -> None:
        """Take in what the files have that is new."""
        self.metrics.read()
        self.timeline.read()
        for row, nbytes in self._rollouts.sized_rows():
            self._forget_replaced()
            kept = row if self._texts else {key: row.get(key) for key in WITHOUT_TEXT}
            self.rollout_rows.append(kept, nbytes if self._texts else 0)
        self._forget_replaced()

    def _forget_replaced(self) -> None:
        """Rollouts of a file that another one has replaced are those of an earlier run."""
        if self._rollouts.replaced != self._replaced:
            self._replaced = self._rollouts.replaced
            self.rollout_rows.clear()

    def bounds(self) -> tuple[float, float]:
        """The first and the last moment of the timeline; now, while a process is alive."""
        start, end = self.timeline.bounds()
        now = time.time()
        return start, now if now - end < SILENT_S else end

    def last(self) -> float:
        """The newest sign of life, in a trace or a row."""
        signs = [each.last for each in [*self.timeline.processes.values()]]
        return max(
            [*signs, *((number(row, "time") or 0.0) for row in self.metrics.versions[-1:])], default=0.0
        )

    def run_state(self) -> str:
        """running, silent, or how it ended"""
        return self._ended() or (RUNNING if time.time() - self.last() < ALIVE_S else SILENT)

    def _ended(self) -> str:
        """As the summary has it; empty if there is none, or if the run has gone on since."""
        path, rows = self.folder / "summary.json", self.metrics.versions
        try:
            with open_to_read(path) as file:
                summary, written = json.loads(file.read(MOST_BYTES)), os.fstat(file.fileno()).st_mtime
        except (OSError, ValueError, RecursionError):
            return ""
        newest = rows[-1]["version"] if rows else 0
        if not isinstance(summary, Mapping) or summary.get("versions") != newest:
            return ""
        return "" if self.last() > written + LEAVES_S else str(summary.get("ended", ""))

    def config(self) -> dict[str, Any]:
        """The run's configuration, as written; empty for none that can be read."""
        path = self.folder / "config.yaml"
        try:
            changed = path.stat().st_mtime
            if changed != self._config[0]:
                self._config = changed, {}  # it is not read again if it is none
                with open_to_read(path) as file:
                    found = yaml.safe_load(file.read(MOST_BYTES).decode())
                self._config = changed, found if isinstance(found, dict) else {}
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            return {}
        return self._config[1]

    def news(self) -> list[tuple[str, Event]]:
        """Events that are no routine, each with the name of its process."""
        return [(name, event) for name, event in self.timeline.events() if event.name not in ROUTINE]
