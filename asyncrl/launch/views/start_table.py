"""The stages of a run's start and their times, from the traces of its processes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from asyncrl.observability.timeline import ProcessTrace, Span
from asyncrl.telemetry.trace_file import FOLDER, SUFFIX

READY = {"learner": ("learner", "wait/groups"), "generator": ("engine", "wait/tasks")}
"""Role → the lane and the span that begin once its process has loaded."""

Stage = tuple[str, str, float, float]
"""Process, stage, beginning and end in seconds since 1970."""


RECENT_S = 60.0
"""A launcher that began longer ago than this before its run is a notebook, or a script with other work."""


def launcher_began() -> float:
    """When this process began, in seconds since 1970; now, if it has done other things before."""
    began = psutil.Process().create_time()
    return began if time.time() - began < RECENT_S else time.time()


class StartTable:
    """The stages since the launcher `began`, in seconds since 1970."""

    def __init__(self, folder: Path, began: float) -> None:
        self._folder, self._began = folder / FOLDER, began
        self._traces: dict[str, ProcessTrace] = {}

    def lines(self) -> list[str]:
        """Read on, and return the table; there is none before the first version is trained, and without traces."""
        for path in self._folder.glob(f"*{SUFFIX}"):
            self._traces.setdefault(path.name, ProcessTrace(path)).read()
        begun = {trace.name: trace for trace in self._traces.values() if math.isfinite(trace.begun)}
        if "launcher" not in begun or not any(_trained(trace) for trace in begun.values()):
            return []
        stages = sorted(_stages(begun, self._began), key=lambda stage: stage[2:])
        rows = [("process", "stage of the start", "from", "to (s)")]
        for name, stage, *times in stages:
            start, end = (f"{moment - self._began:.1f}" for moment in times)
            rows.append((name, stage, start, end))
        names, about = (max(len(row[column]) for row in rows) for column in range(2))
        return [f"{a:{names}}  {b:{about}}  {c:>5}  {d:>6}" for a, b, c, d in rows]


def _stages(traces: Mapping[str, ProcessTrace], began: float) -> Iterator[Stage]:
    launcher = traces["launcher"]
    yield "launcher", "imports, configuration, checks", began, launcher.begun
    started: dict[str, float] = {}
    for event in launcher.events:
        if event.time < began:  # of the run that this one goes on with
            continue
        if event.name == "started":
            started.setdefault(event.about["process"], event.time)
        elif event.name == "imported":
            yield event.about["process"], "imports", event.time - event.about["seconds"], event.time
    for name, at in started.items():
        if (trace := traces.get(name)) is None:
            continue
        yield name, "begins", at, trace.begun
        if trace.role not in READY or (ready := _first(trace, *READY[trace.role])) is None:
            continue
        yield name, "loads the model", trace.begun, ready.start
        group, trained = _first(trace, "rollouts", "generate"), _trained(trace)
        if group is not None:
            yield name, "makes the first group", ready.start, group.end
        if trained is not None:
            yield name, "trains the first version", ready.start, trained.start


def _trained(trace: ProcessTrace) -> Span | None:
    """The learner's first snapshot of weights that it has trained; the one before is of those that it began with."""
    return _first(trace, "weights", "snapshot", 1) if trace.role == "learner" else None


def _first(trace: ProcessTrace, lane: str, name: str, after: int = 0) -> Span | None:
    """The first span of the present process with this name, after so many others."""
    spans = trace.lanes[lane].spans if lane in trace.lanes else []
    found = [span for span in spans if span.name == name and span.start >= trace.begun]
    return found[after] if len(found) > after else None
