"""The files of a replay by other rules, beside those of the run: RUN/what_if/<keys>/.

metrics.jsonl  {"version": 12, "what_if": ["algorithm.loss=gspo"], "train/loss": …}: each step by these rules
final/         the last policy by these rules
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from asyncrl.replay.replayed_learner import Replayed
from asyncrl.telemetry.sinks import JsonlSink

FOLDER = "what_if"

LONGEST = 100
"""Characters of the name of a folder."""


class WhatIf:
    """keys: words key=value by which the steps of `run` are made otherwise"""

    def __init__(self, run: Path, keys: Sequence[str]) -> None:
        name = re.sub(r"[^\w.=-]+", "_", ",".join(keys))[:LONGEST]
        self.folder, self._keys = run / FOLDER / name, list(keys)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._rows = JsonlSink(self.folder / "metrics.jsonl")

    @property
    def model(self) -> Path:
        return self.folder / "final"

    def write(self, made: Replayed) -> None:
        """The metrics of a step by other rules."""
        assert made.otherwise is not None
        row = {"version": made.recorded.version, "what_if": self._keys}
        self._rows.write(row | dict(made.otherwise.values))
