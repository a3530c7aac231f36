"""The view of a run: a table that stays in place on a terminal, a line now and then elsewhere.

A whole run is shown from the rows that the learner appends to metrics.jsonl and the reports of its processes (see
process_reports.py). A process that was started by hand shows itself in the same way (process_view.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from asyncrl.config.schema import Config
from asyncrl.launch.views.output import without_control
from asyncrl.launch.views.process_reports import ProcessReports
from asyncrl.observability.rows import METRICS, RowTail, number
from asyncrl.observability.times import duration

LINE_EVERY_S = 10.0

STILL_S = 5.0
"""Without a new version for so long, the wait for the first one and tasks that were dropped since are shown."""

MOST_NAMED = 3
"""Processes that a line names."""

LINE_LENGTH = 120
"""Most characters of a line with values. What a line must have, such as a wait, may be longer."""

LOSSES = ("eval/unscored", "queue/dropped/reward")
"""Not shown while they are 0."""

COLUMNS: tuple[tuple[str, str, str, str], ...] = (
    # label in the table · in a line, empty: not there · key of the metrics row · format
    ("reward", "reward", "rollout/reward/mean", "{:.3f}"),
    ("held-out accuracy", "held-out", "eval/accuracy", "{:.1%}"),
    ("held-out loss", "held-out loss", "eval/loss", "{:.3f}"),
    ("held-out answers without a score", "unscored", "eval/unscored", "{:.0f}"),
    ("tasks dropped, their reward failed", "reward failed", "queue/dropped/reward", "{:.0f}"),
    ("staleness, mean", "staleness", "train/staleness/mean", "{:.2f}"),
    ("staleness, max", "", "train/staleness/max", "{:.0f}"),
    ("groups ready", "ready", "queue/ready", "{:.0f}"),
    ("groups leased", "", "queue/leased", "{:.0f}"),
    ("generators busy", "generators", "perf/busy/generator", "{:.0%}"),
    ("learner busy", "learner", "perf/busy/learner", "{:.0%}"),
    ("learner waits for groups", "", "perf/wait_fraction/groups", "{:.0%}"),
    ("learner tokens/s", "", "perf/learner/tokens_per_s", "{:,.0f}"),
    ("learner FLOPs used", "", "perf/learner/mfu", "{:.1%}"),
    ("learner memory, GiB", "", "perf/learner/memory_gib", "{:.1f}"),
    ("generator tokens/s", "tokens/s", "perf/generator/tokens_per_s", "{:,.0f}"),
    ("rollout length", "length", "rollout/length/mean", "{:.1f}"),
    ("entropy", "", "train/entropy", "{:.3f}"),
    ("gradient norm", "", "train/grad_norm", "{:.3f}"),
)


@dataclass(frozen=True, slots=True)
class Value:
    """label: in the table · short: in a line, where an empty one leaves the value out"""

    label: str
    short: str
    text: str


class DashboardSource(Protocol):
    """Where the figures of a dashboard come from."""

    def read(self) -> bool:
        """Read new figures. Returns whether a line about them may be due."""

    def alert(self) -> object:
        """Each new value of this gets a line at once."""

    def where(self) -> str:
        """The progress in a few words."""

    def notes(self) -> list[str]:
        """Sentences about now, e.g. what is waited for."""

    def values(self) -> Iterator[Value]: ...


class Dashboard(Protocol):
    def refresh(self) -> None:
        """Show what is new. Called about once a second, never blocks."""

    def print_line(self, text: str) -> None:
        """One line that stays."""


class RunView:
    """The latest value of every metric, how far the run is, and what its processes report."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        reports: ProcessReports | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = config.run.name
        self._clock, self._moved = clock, clock()
        self._reports = reports or ProcessReports(folder / "logs")
        self._tail = RowTail(folder / METRICS)
        self.versions = config.run.versions
        self.version = 0
        self.latest: dict[str, Any] = {}
        self._first: tuple[int, float] | None = None

    def read(self) -> bool:
        """Take in new rows; whether there is something to show: rows, or notes while none come."""
        rows = self._tail.new_rows()
        if rows:
            self._moved = self._clock()
            self._reports.begin_anew()
        for row in rows:
            evaluation = any(key.startswith("eval/") for key in row)
            self.latest.update(row)
            # An evaluation arrives later than the version that it is of.
            if not evaluation:
                self.version = int(number(row, "version") or self.version)
            # Counted from version 1 on: what comes before it is loading.
            if self._first is None and self.version >= 1:
                self._first = (self.version, self.latest["time"])
        return bool(rows or self.notes())

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

    def alert(self) -> object:
        """The last evaluation, whether tasks are dropped while no version comes, who is silent, and each 5 s before the
        first version."""
        first = self.version < 1 and self._wait()
        waited = int((self._clock() - self._moved) // STILL_S) if first else None
        silent = tuple(self._reports.silent())
        return self.latest.get("eval/accuracy"), bool(self._dropped()), silent, waited

    def notes(self) -> list[str]:
        """Tasks dropped while no version comes, else the wait for one; and silent processes."""
        silent = self._reports.silent()
        return [
            *(self._dropped() or self._wait()),
            *([f"no word from {_with_durations(silent)}"] if silent else []),
        ]

    def _wait(self) -> list[str]:
        """Processes load for a while, also those that are started again, and the run must not look dead."""
        waited, loading = self._clock() - self._moved, self._reports.loading()
        if waited < STILL_S or (self.version >= 1 and not loading):
            return []
        first = f"waiting for the learner and the first groups ({duration(waited)})"
        wait = f"no new version for {duration(waited)}" if self.version >= 1 else first
        return [f"{wait}; loading: {_with_durations(loading)}" if loading else wait]

    def _dropped(self) -> list[str]:
        still_s, text = self._clock() - self._moved, self._reports.text()
        return [f"no new version for {duration(still_s)}: {text}"] if text and still_s >= STILL_S else []

    def values(self) -> Iterator[Value]:
        """The figures that are known."""
        return known_values(self.latest)


def known_values(latest: Mapping[str, Any]) -> Iterator[Value]:
    """COLUMNS of the latest value of each metric."""
    for label, short, key, shape in COLUMNS:
        value = number(latest, key)
        if value is not None and (value or key not in LOSSES):
            yield Value(label, short, shape.format(value))


class LiveDashboard:
    """One table that is drawn anew in place. name: of what it shows."""

    def __init__(self, source: DashboardSource, live: Live, name: str) -> None:
        self._source, self._live, self._name = source, live, name

    def refresh(self) -> None:
        if self._source.read():
            self._live.update(self._table(), refresh=True)

    def print_line(self, text: str) -> None:
        self._live.console.print(without_control(text), highlight=False, markup=False)

    def _table(self) -> Table:
        title = f"{self._name}: {self._source.where()}"
        table = Table(title=cell(title), title_justify="left", show_header=False)
        for value in self._source.values():
            table.add_row(cell(value.label), cell(value.text))
        for note in self._source.notes():
            table.add_row("now", cell(note))
        return table


class LineDashboard:
    """For a file or a pipe: one line every `every_s` seconds, and one for each new `alert` of the source. title: begins
    each line."""

    def __init__(
        self,
        source: DashboardSource,
        console: Console,
        every_s: float = LINE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
        title: str = "",
    ) -> None:
        self._source, self._console, self._every_s, self._clock = source, console, every_s, clock
        self._title = title
        self._printed_at, self._alert = clock(), source.alert()

    def refresh(self) -> None:
        if not self._source.read():
            return
        now, alert = self._clock(), self._source.alert()
        if now - self._printed_at >= self._every_s or alert != self._alert:
            self._printed_at, self._alert = now, alert
            self.print_line(status_line(self._source, self._title))

    def print_line(self, text: str) -> None:
        self._console.print(without_control(text), highlight=False, markup=False, soft_wrap=True)


def status_line(source: DashboardSource, title: str = "") -> str:
    """The title, the progress, the notes, and as many values as a line has room for, in their order."""
    where = f"{title}: {source.where()}" if title else source.where()
    line = "  ".join([where, *source.notes()])
    for value in source.values():
        longer = f"{line}  {value.short} {value.text}"
        if value.short and len(longer) <= LINE_LENGTH:
            line = longer
    return line


class QuietDashboard:
    """Messages only."""

    def refresh(self) -> None:
        pass

    def print_line(self, text: str) -> None:
        print(without_control(text), file=sys.stderr, flush=True)


@contextmanager
def open_dashboard(config: Config, view: RunView) -> Iterator[Dashboard]:
    """The one that fits `launch.quiet` and where the output goes."""
    console = Console()
    if config.launch.quiet:
        yield QuietDashboard()
    elif console.is_terminal:
        # Refreshed by hand: a refresh thread would be alive while the launcher forks.
        with Live(console=console, auto_refresh=False) as live:
            yield LiveDashboard(view, live, config.run.name)
    else:
        yield LineDashboard(view, console)


def print_summary(summary: Mapping[str, Any], folder: Path) -> None:
    """The run in one table; nested keys are joined with dots."""
    table = Table(title=cell(folder), title_justify="left", show_header=False)
    for key, value in dotted(summary):
        table.add_row(cell(key), cell(f"{value:,.4g}" if isinstance(value, float) else value))
    Console().print(table)


def print_comparison(title: str, before: Mapping[str, Any], now: Mapping[str, float]) -> None:
    """Values of a run and of now, by name."""
    table = Table("", "run", "now", title=cell(title), title_justify="left")
    for key, value in sorted(now.items()):
        table.add_row(cell(key), cell(f"{before[key]:,.6g}" if key in before else ""), cell(f"{value:,.6g}"))
    Console().print(table)


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """
    >>> list(dotted({"versions": 3, "staleness": {"max": 2}}))
    [('versions', 3), ('staleness.max', 2)]
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def cell(text: object) -> Text:
    """A cell or title of a table. Square brackets are no markup in it."""
    return Text(without_control(str(text)))


def _with_durations(seconds_by_name: Mapping[str, float]) -> str:
    """
    >>> _with_durations({"learner": 35.2, "generator-0": 20.0, "generator-1": 3.0, "generator-2": 3.0})
    'learner 35 s, generator-0 20 s, generator-1 3 s and 1 more'
    """
    named = [f"{name} {duration(seconds)}" for name, seconds in seconds_by_name.items()]
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return ", ".join(named[:MOST_NAMED]) + more
