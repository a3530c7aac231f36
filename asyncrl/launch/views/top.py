"""`asyncrl top`: a run's folder as one screen of a terminal, drawn anew every second; it only reads.

RunFiles ──▸ head: state, pace, who waits · findings · figures · a row for each process · events ──▸ terminal
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from asyncrl.launch.views.dashboard import Value, cell, known_values
from asyncrl.launch.views.findings import LiveFindings, finding_lines
from asyncrl.launch.views.output import within_line
from asyncrl.observability.overview import overview
from asyncrl.observability.rows import Row
from asyncrl.observability.run_files import ALIVE_S, RUNNING, RunFiles
from asyncrl.observability.timeline import ProcessTrace
from asyncrl.observability.times import clock, duration

REFRESH_S = 1.0
FIND_EVERY_S = 10.0
BUSY_S = 60.0
"""The time of which a process has its busy share."""

LEAST_WIDTH, TALL = 60, 40
VALUE_WIDTH = 44
"""Of a figure and its label, several of which stand beside each other."""

MOST_PROCESSES, MOST_EVENTS, MOST_FINDINGS = 24, 6, 4
QUEUE = {
    "queue/pending": "tasks pending",
    "queue/claimed": "groups claimed",
    "queue/oldest_lease_s": "oldest lease, s",
    "queue/age/oldest": "oldest ready group, versions",
    "queue/lacking_columns": "groups that wait for a pool",
}
ROLES = ("launcher", "queue", "learner", "generator")
COLORS = {"wrong": "red", "warning": "yellow", "note": "green"}


class TopScreen:
    """The screen of one run, as of the last `read`."""

    def __init__(self, folder: Path) -> None:
        self._run, self._found_at = RunFiles(folder), -math.inf
        self._live = LiveFindings(self._run)
        self._findings: list[dict[str, str]] = []

    def read(self) -> None:
        if time.monotonic() - self._found_at < FIND_EVERY_S:
            self._run.read()
        else:
            self._found_at = time.monotonic()
            self._findings = [finding.answer() for finding in self._live.all()]

    def drawn(self, width: int, height: int = TALL) -> RenderableType:
        """height: below TALL, findings have their sentence alone"""
        head, width = overview(self._run), max(LEAST_WIDTH, width)
        parts: list[RenderableType] = [cell(within_line(line)) for line in self._head(head)]
        for finding in self._findings[:MOST_FINDINGS]:
            shown = finding if height >= TALL else finding | {"evidence": "", "remedy": ""}
            lines = [cell(line) for line in finding_lines(shown, width)]
            lines[0].stylize(COLORS[finding["severity"]], 0, len(finding["severity"]))
            parts += lines
        if (more := len(self._findings) - MOST_FINDINGS) > 0:
            parts.append(cell(f"{more} more findings: asyncrl doctor {self._run.name}"))
        blank = cell("")
        return Group(
            *parts, blank, self._figures(width), blank, self._processes(head), blank, *self._events()
        )

    def _head(self, head: dict[str, Any]) -> Iterator[str]:
        words = [f"{self._run.name}: {head['state']}", f"version {head['version']}"]
        words[-1] += "" if head["versions"] is None else f" of {head['versions']}"
        if head["pace"]:
            fast = head["pace"] >= 0.1
            words.append(
                f"{head['pace']:.2f} versions/s" if fast else f"{duration(1 / head['pace'])} a version"
            )
        words += [] if head["left_s"] is None else [f"{duration(head['left_s'])} left"]
        if head["state"] != RUNNING:
            words.append(f"last sign {clock(head['last'])}")
        yield ", ".join(words)
        yield head["bottleneck"]

    def _figures(self, width: int) -> Table:
        """Figures of the newest row, of the last evaluation, and of the queue right now."""
        now, values = self._latest(), list[Value]()
        values += known_values(now)
        values += [Value(name, "", f"{now[key]:.4g}") for key, name in QUEUE.items() if now.get(key)]
        beside = max(1, width // VALUE_WIDTH)
        table = Table.grid(*[column for _ in range(beside) for column in ("", "")], padding=(0, 2))
        for at in range(0, len(values), beside):
            pairs = [(cell(value.label), cell(value.text)) for value in values[at : at + beside]]
            table.add_row(*[text for pair in pairs for text in pair])
        return table

    def _latest(self) -> Row:
        rows = [*self._run.metrics.versions[-1:], *self._run.metrics.evaluations[-1:]]
        queues = (each for each in self._run.timeline.processes.values() if each.role == "queue")
        sampled = ({key: values[-1] for key, (_, values) in each.figures.items()} for each in queues)
        return {key: value for row in (*rows, *sampled) for key, value in row.items()}

    def _processes(self, head: dict[str, Any]) -> Table:
        heads = ("process", "now", "since", "busy", "version", "behind", "tokens/s")
        table = Table(*heads, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False, box=None)
        now = time.time() if head["state"] == RUNNING else self._run.last()
        found = [*self._run.timeline.processes.values()]
        found.sort(
            key=lambda each: (ROLES.index(each.role) if each.role in ROLES else 9, len(each.name), each.name)
        )
        for process in found[:MOST_PROCESSES]:
            doing, since = _doing(process, now)
            held = process.figures.get("sync/held", ([], []))[1][-1:]
            speed = process.figures.get("perf/generator/tokens_per_s", ([], []))[1][-1:]
            texts = [process.name, doing, duration(now - since) if since else "", _busy(process, now)]
            texts += [f"{held[0]:.0f}", f"{max(0, head['version'] - held[0]):.0f}"] if held else ["", ""]
            table.add_row(
                *(cell(within_line(text)) for text in (*texts, f"{speed[0]:,.0f}" if speed else ""))
            )
        if (more := len(found) - MOST_PROCESSES) > 0:
            table.add_row(cell(f"and {more} more"))
        return table

    def _events(self) -> Iterator[RenderableType]:
        for name, event in self._run.news()[-MOST_EVENTS:]:
            about = ", ".join(f"{key} {value}" for key, value in event.about.items())
            yield cell(within_line(f"{clock(event.time)}  {name}: {event.name} {about}"))


def show(folder: Path, once: bool) -> None:
    """Until Ctrl-C; one screen where `once` is set or the output is no terminal."""
    screen, console = TopScreen(folder), Console()
    screen.read()
    if once or not console.is_terminal:
        console.print(screen.drawn(console.width))
        return
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(screen.drawn(console.width, console.height), refresh=True)
                time.sleep(REFRESH_S)
                screen.read()
    except KeyboardInterrupt:
        return


def _doing(process: ProcessTrace, now: float) -> tuple[str, float]:
    """The span of the process's loop that lasts, and when it began; or that it is silent, or has ended."""
    if now - process.last > ALIVE_S:
        return "silent", process.last
    spans = [lane.spans[-1] for lane in process.lanes.values() if lane.switches and lane.spans]
    lasting = [span for span in spans if math.isnan(span.end)]
    return (lasting[-1].name, lasting[-1].start) if lasting else ("", 0.0)


def _busy(process: ProcessTrace, now: float) -> str:
    """The share of work of the process's loop in the last BUSY_S."""
    start, work = max(now - BUSY_S, process.first), 0.0
    lanes = [lane for lane in process.lanes.values() if lane.switches]
    for lane in lanes:
        for span in reversed(lane.spans):
            end = process.end_of(span, now)
            if end <= start:
                break
            work += 0.0 if span.name.startswith("wait/") else end - max(start, span.start)
    return f"{work / len(lanes) / (now - start):.0%}" if lanes and now > start else ""
