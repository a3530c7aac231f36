"""The traces of a run, read back: lanes with spans, events and figures of every process, on the clock of the queue.

    RUN/trace/<process>.jsonl ──▸ ProcessTrace: rows, as they are appended ──▸ Timeline: all processes

The rows are those of telemetry/tracing.py. A span without an end is open: it lasts until now in a process that is
alive, and until the last sign of life of one that was killed.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.telemetry.trace_file import EARLIER, FOLDER, SUFFIX, TraceTail
from asyncrl.telemetry.tracing import ALIVE_S, QUEUE

SILENT_S = 3 * ALIVE_S
"""A process whose last row is older is taken for dead."""

LATEST_S = 1e11
"""The year 5138: a row with a later time is none."""

NO_ROW = (msgspec.DecodeError, RecursionError, TypeError, ValueError, KeyError, AttributeError)
"""Errors of lines that are no rows."""

FILES = 2
"""Of a process, that are read at once: the one that is full, and the next."""

LONGEST = 1 << 18
"""Bytes of a row. Longer lines are no rows."""

LARGEST_FIGURE = 1e100

MOST_SPANS = 4_000_000
"""Spans of a run that are held, 250 bytes each. Beyond it, the oldest of each process are forgotten."""

ROW_KEYS = frozenset({"t", "took", "lane", "do", "begin", "end", "event", "values", "clock"})


@dataclass(slots=True)
class Span:
    """start, end: seconds since 1970 by the clock of the queue; end is NaN while the span is open. about: what the
    process has noted with it, e.g. its version."""

    name: str
    start: float
    end: float = math.nan
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Lane:
    """One loop of a process. In a lane that switches, spans follow each other; others may overlap."""

    name: str
    switches: bool
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Event:
    """time: seconds since 1970 by the clock of the queue"""

    name: str
    time: float
    about: dict[str, Any]


class ProcessTrace:
    """One process's lanes, events and figures. `read` takes in the rows that were appended since.

    figures  metric name ▸ its times and values
    first    time of the oldest row, or of a span that began before it
    last     time of the newest row
    damaged  lines that are no rows: the last line of a process that was killed, a full disk
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, shown_name(path.name.removesuffix(SUFFIX))
        self.role = self.host = ""
        self.lanes: dict[str, Lane] = {}
        self.events: list[Event] = []
        self.figures: dict[str, tuple[list[float], list[float]]] = {}
        self.offset_s = self.offset_error_s = 0.0
        self.damaged = 0
        self._open: dict[int, Span] = {}
        self._tail = TraceTail(path)
        self._before = (math.inf, 0.0)  # first and last of the processes of this name before the present one
        self._first, self._last = math.inf, 0.0  # of the present one
        self._unshifted: _Counts | None = None  # what there was when it began; None: its clock is known

    @property
    def first(self) -> float:
        return min(self._before[0], self._first)

    @property
    def begun(self) -> float:
        """When the present process of this name began."""
        return self._first

    @property
    def last(self) -> float:
        return max(self._before[1], self._last)

    @property
    def shifted(self) -> bool:
        """Whether all that is here has its last place on the queue's clock."""
        return self._unshifted is None or self.role == QUEUE

    def read(self, most: int = 1 << 30) -> bool:
        """Whether there were new rows. most: bytes of one file"""
        new = False
        for _ in range(FILES):
            lines = self._tail.read(most)
            for line in lines.split(b"\n")[:-1]:
                try:
                    if len(line) > LONGEST:
                        raise ValueError(f"a row of {len(line)} bytes")
                    self._take(_decode(line))
                except NO_ROW:
                    self.damaged += 1
            new |= bool(lines)
        return new

    def end_of(self, span: Span, now: float) -> float:
        """Where a span ends, `now` or at the last sign of life for one that is open."""
        if not math.isnan(span.end):
            return span.end
        return max(span.start, self.last if now - self.last > SILENT_S else now)

    def keep(self, most: int) -> None:
        """Forget the older half of each lane's spans if there are more than `most`."""
        if sum(len(lane.spans) for lane in self.lanes.values()) <= most:
            return
        for name, lane in self.lanes.items():
            older = len(lane.spans) // 2
            del lane.spans[:older]
            if self._unshifted is not None:
                self._unshifted.spans[name] = max(0, self._unshifted.spans.get(name, 0) - older)

    def forget(self, before: float) -> None:
        """Drop spans that ended before a moment, and figures of that time; events stay. A process that has begun since
        keeps all: its clock may still be set."""
        if self._unshifted is not None and self._first > before:
            return
        self._unshifted = None
        for lane in self.lanes.values():
            lane.spans[:] = [span for span in lane.spans if not span.end < before]
        for times, values in self.figures.values():
            kept = bisect_left(times, before)
            del times[:kept], values[:kept]

    def _take(self, row: dict[str, Any]) -> None:
        """Raises one of NO_ROW."""
        at = _time(row["t"]) + self.offset_s
        if "event" in row:
            self.events.append(Event(_text(row["event"]), at, _about(row)))
        elif "begin" in row or "took" in row:
            self._take_span(row, at)
        elif "end" in row:
            if span := self._open.pop(row["end"], None):
                span.end = max(at, span.start)
                span.about |= _about(row)
        elif "process" in row:
            self._begin(row, at)
        elif "clock" in row:
            self._set_clock(*map(_number, row["clock"]))
            at = row["t"] + self.offset_s
        elif "lane" in row:
            self._switch(_text(row["lane"]), row["do"] and _text(row["do"]), at)
        elif "values" in row:
            for name, value in row["values"].items():
                if isinstance(value, int | float) and abs(value) <= LARGEST_FIGURE:
                    times, values = self.figures.setdefault(name, ([], []))
                    times.append(at)
                    values.append(value)
        self._first, self._last = min(self._first, at), max(self._last, at)

    def _take_span(self, row: dict[str, Any], at: float) -> None:
        span = Span(_text(row["do"]), at, about=_about(row))
        lane = self._lane(_text(row["lane"]), switches=False)
        if "took" in row:
            span.start, span.end = at - _time(row["took"]), at
            self._first = min(self._first, span.start)
        else:
            self._open[row["begin"]] = span
        lane.spans.append(span)

    def _switch(self, name: str, doing: str | None, at: float) -> None:
        spans = self._lane(name, switches=True).spans
        if spans:
            at = max(at, spans[-1].start)
            if math.isnan(spans[-1].end):
                if spans[-1].name == doing:
                    return  # said again at the top of a file
                spans[-1].end = at
        if doing is not None:
            spans.append(Span(doing, at))

    def _lane(self, name: str, switches: bool) -> Lane:
        """Raises ValueError for a row of the other kind than the lane's first one."""
        lane = self.lanes.setdefault(name, Lane(name, switches))
        if lane.switches != switches:
            raise ValueError(f"lane {name} has rows of both kinds")
        return lane

    def _begin(self, row: dict[str, Any], at: float) -> None:
        """A process of this name begins. Spans that the one before has left open end at its last row."""
        self.role, self.host = str(row.get("role", "")), str(row.get("host", ""))
        if self._last and row.get("continues"):
            return
        if self.last:
            self.events.append(Event("began again", max(at, self.last), {"pid": row.get("pid")}))
        for lane in self.lanes.values():
            for span in lane.spans[-1:] if lane.switches else self._open.values():
                if math.isnan(span.end):
                    span.end = max(self.last, span.start)
        self._open.clear()
        self._before = self.first, self.last
        self._first, self._last = math.inf, 0.0
        self._unshifted = _Counts.of(self)

    def _set_clock(self, offset_s: float, error_s: float) -> None:
        """The first offset that a process notes holds for its rows before, too."""
        shift_s, self.offset_s, self.offset_error_s = offset_s - self.offset_s, offset_s, error_s
        if self._unshifted is not None and shift_s:
            self._unshifted.shift(self, shift_s)
            self._first, self._last = self._first + shift_s, self._last and self._last + shift_s
        self._unshifted = None


@dataclass(frozen=True, slots=True)
class _Counts:
    """The length of each list of a trace at some moment."""

    spans: dict[str, int]
    events: int
    figures: dict[str, int]

    @staticmethod
    def of(trace: ProcessTrace) -> _Counts:
        spans = {name: len(lane.spans) for name, lane in trace.lanes.items()}
        figures = {name: len(times) for name, (times, _) in trace.figures.items()}
        return _Counts(spans, len(trace.events), figures)

    def shift(self, trace: ProcessTrace, seconds: float) -> None:
        """Move all that came since."""
        for name, lane in trace.lanes.items():
            for span in lane.spans[self.spans.get(name, 0) :]:
                span.start, span.end = span.start + seconds, span.end + seconds
        trace.events[self.events :] = [
            Event(event.name, event.time + seconds, event.about) for event in trace.events[self.events :]
        ]
        for name, (times, _) in trace.figures.items():
            begun = self.figures.get(name, 0)
            times[begun:] = [at + seconds for at in times[begun:]]


class Timeline:
    """The traces of all processes of a run. processes: by name, in the order in which they appeared."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / FOLDER
        self.processes: dict[str, ProcessTrace] = {}

    def find(self) -> None:
        """Take in new processes."""
        known = {trace.path for trace in self.processes.values()}
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            if path not in known and not path.name.endswith(f"{EARLIER}{SUFFIX}"):
                trace = ProcessTrace(path)
                self.processes[trace.name] = trace

    def read(self) -> bool:
        """Take in new processes and rows. Returns whether there were any."""
        self.find()
        new = False
        for trace in self.processes.values():
            new |= trace.read()
            trace.keep(MOST_SPANS // len(self.processes))
        return new

    def forget(self, before: float) -> None:
        """For readers that look at the last hours alone."""
        for trace in self.processes.values():
            trace.forget(before)

    def bounds(self) -> tuple[float, float]:
        """The first and the last moment that a process has noted; both now for none."""
        noted = [each for each in self.processes.values() if each.last]
        now = time.time()
        return min((each.first for each in noted), default=now), max(
            (each.last for each in noted), default=now
        )

    def events(self) -> list[tuple[str, Event]]:
        """Events of all processes in order of time, each with the name of its process."""
        found = [(each.name, event) for each in self.processes.values() for event in each.events]
        return sorted(found, key=lambda pair: pair[1].time)


def shown_name(name: str) -> str:
    """The name of a file as text: bytes that are none are replaced.

    >>> shown_name("gen\\udcff")
    'gen?'
    """
    return name.encode(errors="replace").decode()


def _about(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ROW_KEYS}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LATEST_S:
        raise ValueError(f"{value!r} is no number of seconds")
    return float(value)


def _time(value: Any) -> float:
    if (number := _number(value)) < 0:
        raise ValueError(f"{value!r} lies in the past")
    return number


_decode = msgspec.json.Decoder(dict[str, Any]).decode
