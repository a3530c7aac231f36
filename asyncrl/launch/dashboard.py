"""What a person sees of a run: a table that stays in place on a terminal, a line now and then elsewhere.

Everything comes from the rows that the learner appends to metrics.jsonl; the dashboard talks to no process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from asyncrl.config.schema import Config

LINE_EVERY_S = 10.0

LOSSES = ("heldout/unscored", "queue/dropped/reward")
"""Not shown while they are 0."""

COLUMNS: tuple[tuple[str, str, str], ...] = (
    # what a person reads · key of the metrics row · format
    ("reward", "reward/mean", "{:.3f}"),
    ("held-out accuracy", "heldout/accuracy", "{:.1%}"),
    ("held-out answers without a score", "heldout/unscored", "{:.0f}"),
    ("tasks dropped, their reward failed", "queue/dropped/reward", "{:.0f}"),
    ("staleness, mean", "staleness/mean", "{:.2f}"),
    ("staleness, max", "staleness/max", "{:.0f}"),
    ("groups ready", "queue/ready", "{:.0f}"),
    ("groups leased", "queue/leased", "{:.0f}"),
    ("generators busy", "busy/generator", "{:.0%}"),
    ("learner busy", "busy/learner", "{:.0%}"),
    ("learner waits for groups", "share/wait/groups", "{:.0%}"),
    ("learner tokens/s", "learner/tokens_per_s", "{:,.0f}"),
    ("learner FLOPs used", "learner/mfu", "{:.1%}"),
    ("learner memory, GiB", "learner/memory_gib", "{:.1f}"),
    ("generator tokens/s", "tokens_per_s", "{:,.0f}"),
    ("rollout length", "length/mean", "{:.1f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("gradient norm", "grad_norm", "{:.3f}"),
)


class Dashboard(Protocol):
    def refresh(self) -> None:
        """Show what is new. Called about once a second, never blocks."""

    def say(self, text: str) -> None:
        """One line that stays."""


class RowTail:
    """Rows of a JSONL file as they are appended. A file that was replaced is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._inode = path, 0, 0

    def new_rows(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                stat = self._path.stat()
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._inode, self._offset = stat.st_ino, 0
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]


class Progress:
    """The latest value of every metric, and how far the run is."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._tail = RowTail(folder / "metrics.jsonl")
        self.versions = config.run.versions
        self.version = 0
        self.latest: dict[str, Any] = {}
        self._first: tuple[int, float] | None = None

    def read(self) -> bool:
        """Take in new rows; whether there were any."""
        rows = self._tail.new_rows()
        for row in rows:
            evaluation = any(key.startswith("heldout/") for key in row)
            self.latest.update(row)
            # An evaluation arrives later than the version that it is of.
            if not evaluation:
                self.version = int(row.get("version", self.version))
            # Counted from version 1 on: what comes before it is loading.
            if self._first is None and self.version >= 1:
                self._first = (self.version, self.latest["time"])
        return bool(rows)

    def seconds_left(self) -> float | None:
        """At the pace so far."""
        if self._first is None or self.version == self._first[0]:
            return None
        pace = (self.latest["time"] - self._first[1]) / (self.version - self._first[0])
        return float(pace * (self.versions - self.version))

    def where(self) -> str:
        """'version 3 of 10, 20 s left'"""
        left = self.seconds_left()
        ending = "" if left is None else f", {duration(left)} left"
        return f"version {self.version} of {self.versions}{ending}"

    def values(self) -> Iterator[tuple[str, str]]:
        """(label, text) of what is known."""
        for label, key, shape in COLUMNS:
            value = self.latest.get(key)
            if isinstance(value, (int, float)) and (value or key not in LOSSES):
                yield label, shape.format(value)


class LiveDashboard:
    def __init__(self, progress: Progress, live: Live, name: str) -> None:
        self._progress, self._live, self._name = progress, live, name

    def refresh(self) -> None:
        if self._progress.read():
            self._live.update(self._table(), refresh=True)

    def say(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def _table(self) -> Table:
        title = f"{self._name}: {self._progress.where()}"
        table = Table(title=title, title_justify="left", show_header=False)
        for label, text in self._progress.values():
            table.add_row(label, text)
        return table


class LineDashboard:
    """For a file or a pipe: one line every `LINE_EVERY_S` seconds, and one for each evaluation."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress, self._console = progress, console
        self._said, self._accuracy = time.monotonic(), None

    def refresh(self) -> None:
        if not self._progress.read():
            return
        accuracy = self._progress.latest.get("heldout/accuracy")
        due = time.monotonic() - self._said >= LINE_EVERY_S
        if due or accuracy != self._accuracy:
            self._said, self._accuracy = time.monotonic(), accuracy
            values = "  ".join(f"{label} {text}" for label, text in self._progress.values())
            self.say(f"{self._progress.where()}  {values}")

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class QuietDashboard:
    """Messages only."""

    def refresh(self) -> None:
        pass

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def open_dashboard(config: Config, folder: Path) -> Iterator[Dashboard]:
    """The one that fits `launch.quiet` and where the output goes."""
    console = Console()
    if config.launch.quiet:
        yield QuietDashboard()
    elif console.is_terminal:
        # Refreshed by hand: a refresh thread would be alive while the launcher forks.
        with Live(console=console, auto_refresh=False) as live:
            yield LiveDashboard(Progress(config, folder), live, config.run.name)
    else:
        yield LineDashboard(Progress(config, folder), console)


def print_summary(summary: Mapping[str, Any], folder: Path) -> None:
    """The run in one table; nested keys are joined with dots."""
    table = Table(title=f"{folder}", title_justify="left", show_header=False)
    for key, value in flat(summary):
        table.add_row(key, f"{value:,.4g}" if isinstance(value, float) else f"{value}")
    Console().print(table)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """
    >>> list(flat({"versions": 3, "staleness": {"max": 2}}))
    [('versions', 3), ('staleness.max', 2)]
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def duration(seconds: float) -> str:
    """
    >>> duration(75), duration(3700)
    ('1 min 15 s', '1 h 1 min')
    """
    whole = max(0, round(seconds))
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"
