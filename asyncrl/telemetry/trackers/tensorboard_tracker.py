"""TensorBoard: event files in RUN/tensorboard. It has neither projects nor tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.telemetry.trackers.tracker import COLUMNS, ROLLOUTS, TrackedRun, Tracker


class TensorboardTracker(Tracker):
    """A resumed run hides the rows of later versions."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.resume_at is None else run.resume_at + 1
        self._writer = SummaryWriter(log_dir=str(run.folder / "tensorboard"), purge_step=purge)

    def write(self, version: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, version)
        self._writer.flush()

    def write_rollouts(self, version: int, table: Sequence[Sequence[Any]]) -> None:
        lines = [COLUMNS, ["---"] * len(COLUMNS), *table]
        text = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
        self._writer.add_text(ROLLOUTS, text, version)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _cell(value: Any) -> str:
    r"""The cell of a table in Markdown.

    >>> _cell("a|b\nc")
    'a\\|b ⏎ c'
    """
    return str(value).replace("|", "\\|").replace("\n", " ⏎ ")
