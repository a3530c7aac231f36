"""A run's traces in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    RUN/trace/<process>.jsonl ──▸ ProcessTrace, a piece at a time ──▸ events ──▸ one JSON file, written as it is made

    a process             a process, and one counter for each of its figures
    a lane                a thread; spans of a lane that overlap get threads of their own, "weights 2", …
    an event              an instant
    generate ──▸ claim    an arrow, from the making of a group to the moment at which a learner rank takes it
    snapshot ──▸ flip     an arrow, from the learner's copy of a version to each generator that makes it live

Learner ranks come first: arrows that end at a generator begin there, and the others end there. Times are microseconds
since 1970 by the clock of the queue.
"""

from __future__ import annotations

import gzip
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.observability.timeline import Event, Lane, ProcessTrace, Span, Timeline
from asyncrl.system.disk import writing

FIRST, PIECE = 1 << 18, 1 << 22
"""Bytes of a trace that are read first, for its role, and then at once. Longer rows are damaged ones."""

LEARNER, CLAIM = "learner", "claim"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an arrow begins or ends."""

    pid: int
    tid: int
    at: float

    def row(self, phase: str, name: str, number: int) -> Row:
        row = {"ph": phase, "name": name, "cat": name, "id": number, "ts": _us(self.at)}
        return row | {"pid": self.pid, "tid": self.tid} | ({"bp": "e"} if phase == "f" else {})


class TraceExport:
    """The rows of one file."""

    def __init__(self) -> None:
        self._tids, self._arrows = itertools.count(1), itertools.count(1)
        self._claims: dict[int, Place] = {}
        self._snapshots: dict[int, Place] = {}

    def rows(self, run_folder: Path) -> Iterator[Row]:
        timeline = Timeline(run_folder)
        timeline.find()
        for trace in timeline.processes.values():
            trace.read(FIRST)
        ordered = sorted(timeline.processes.values(), key=lambda trace: (trace.role != LEARNER, trace.name))
        for pid, trace in enumerate(ordered, 1):
            yield from self._process(trace, pid)

    def _process(self, trace: ProcessTrace, pid: int) -> Iterator[Row]:
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": trace.name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        threads = Threads(pid, self._tids)
        yield threads.row(threads.events, "events")
        for more in pieces(trace):
            yield from self._taken(trace, pid, threads, ended=more)

    def _taken(self, trace: ProcessTrace, pid: int, threads: Threads, ended: bool) -> Iterator[Row]:
        """Rows of all that was read since, which the trace then forgets. ended: without spans that are still open"""
        for lane, span, start, end in taken_spans(trace, ended):
            tid, new = threads.of(lane, start, end)
            yield from new
            yield _span(lane, span, pid, tid, start, end)
            yield from self._arrow(span, Place(pid, tid, start))
        for event in trace.events:
            yield _instant(event, pid, threads.events)
            if event.name == CLAIM:
                place = Place(pid, threads.first(LEARNER), event.time)
                tasks = event.about.get("tasks")
                self._claims |= {_whole(task): place for task in (tasks if isinstance(tasks, list) else ())}
        for name, (times, values) in trace.figures.items():
            for at, value in zip(times, values, strict=True):
                if math.isfinite(value):
                    yield {"ph": "C", "name": name, "pid": pid, "ts": _us(at), "args": {"value": value}}
        trace.events.clear()
        trace.figures.clear()

    def _arrow(self, span: Span, place: Place) -> Iterator[Row]:
        version, task = _whole(span.about.get("version")), _whole(span.about.get("task"))
        if span.name == "snapshot":
            self._snapshots[version] = place
        elif span.name == "flip" and (begin := self._snapshots.get(version)) and begin.at <= place.at:
            yield from self._rows_of("weights", begin, place)
        elif span.name == "generate" and (end := self._claims.get(task)) and end.at >= place.at:
            yield from self._rows_of("group", place, end)

    def _rows_of(self, name: str, begin: Place, end: Place) -> Iterator[Row]:
        number = next(self._arrows)
        yield begin.row("s", name, number)
        yield end.row("f", name, number)


class Threads:
    """The threads of one process: as many for each lane as its spans need, so that those of a thread never overlap."""

    def __init__(self, pid: int, numbers: Iterator[int]) -> None:
        self._pid, self._numbers = pid, numbers
        self._of: dict[str, list[tuple[int, float]]] = {}
        self.events = next(numbers)

    def of(self, lane: Lane, start: float, end: float) -> tuple[int, list[Row]]:
        """The thread of a span, and the rows that name it if it is new."""
        mine = self._of.setdefault(lane.name, [])
        for index, (tid, busy) in enumerate(mine):
            if busy <= start:
                mine[index] = tid, end
                return tid, []
        tid, name = next(self._numbers), lane.name if not mine else f"{lane.name} {len(mine) + 1}"
        mine.append((tid, end))
        return tid, [self.row(tid, name)]

    def first(self, lane: str) -> int:
        """The first thread of a lane, else that of instants."""
        return self._of[lane][0][0] if lane in self._of else self.events

    def row(self, tid: int, name: str) -> Row:
        return {"ph": "M", "name": "thread_name", "pid": self._pid, "tid": tid, "args": {"name": name}}


def pieces(trace: ProcessTrace) -> Iterator[bool]:
    """Read a trace piece by piece; after each, whether more may come. The reader takes what was read."""
    while trace.read(PIECE):
        if trace.shifted:
            yield True
    yield False


def taken_spans(trace: ProcessTrace, ended: bool) -> Iterator[tuple[Lane, Span, float, float]]:
    """(lane, span, start, end) of the spans that were read since, which the trace then forgets; of each lane in order
    of their start. ended: without spans that are still open"""
    now = time.time()
    for lane in trace.lanes.values():
        every = [(span.start, trace.end_of(span, now), span) for span in lane.spans]
        done = [one for one in every if not (ended and math.isnan(one[2].end))]
        lane.spans = [span for _, _, span in every if ended and math.isnan(span.end)]
        for start, end, span in sorted(done, key=lambda one: one[:2]):
            yield lane, span, start, end


def write_trace(run_folder: Path, file: Path) -> int:
    """Write the file, compressed if its name ends with .gz; its size in bytes."""
    with writing(file), gzip.open(file, "wb", 5) if file.suffix == ".gz" else file.open("wb") as out:
        out.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
        for number, row in enumerate(TraceExport().rows(run_folder)):
            out.write((b",\n" if number else b"\n") + msgspec.json.encode(row))
        out.write(b"\n]}\n")
    return file.stat().st_size


def _span(lane: Lane, span: Span, pid: int, tid: int, start: float, end: float) -> Row:
    begin = _us(start)
    row = {"ph": "X", "name": span.name, "cat": lane.name, "ts": begin, "dur": max(0, _us(end) - begin)}
    return {**row, "pid": pid, "tid": tid, "args": span.about}


def _instant(event: Event, pid: int, tid: int) -> Row:
    row = {"ph": "i", "name": event.name, "ts": _us(event.time), "pid": pid, "tid": tid, "s": "p"}
    return {**row, "args": event.about}


def _whole(value: Any) -> int:
    """The number of a task or version; -1 for what is none, in a row that is damaged."""
    return value if isinstance(value, int) else -1


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
