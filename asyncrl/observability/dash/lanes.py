"""Lanes of a timeline as a screen shows them: how long each name lasted in each pixel column.

    spans, as they come ──▸ LaneTrack: rows of spans that follow each other; a pile for those that find no row
                              │
                              └─ seconds(edges) ──▸ per row: name ▸ seconds in each column, none of them lost

A column costs two binary searches for each name, however many spans there are: each row keeps running sums.

Axes: P columns between P + 1 edges; S spans. Times are seconds; a track keeps them relative to its first span, so
that sums are exact to a microsecond.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from asyncrl.observability.timeline import Span

Floats = npt.NDArray[np.float64]

MOST_ROWS = 4
"""Rows of a lane whose spans overlap. A span that finds all of them taken goes to the pile."""

TOUCH_S = 1e-6
"""Spans of one row may overlap by so much: times are written to the microsecond."""


class Growing:
    """Floats that are appended, as an array."""

    def __init__(self) -> None:
        self._room, self._size = np.empty(64), 0

    def append(self, value: float) -> None:
        if self._size == len(self._room):
            self._room = np.concatenate([self._room, np.empty(len(self._room))])
        self._room[self._size] = value
        self._size += 1

    def array(self) -> Floats:
        return self._room[: self._size]


class Stretch:
    """The spans of one name in one row: they follow each other."""

    def __init__(self) -> None:
        self._starts, self._lengths, self._before = Growing(), Growing(), Growing()
        self._total = 0.0

    def add(self, start: float, end: float) -> None:
        self._starts.append(start)
        self._lengths.append(end - start)
        self._before.append(self._total)
        self._total += end - start

    def seconds(self, edges: Floats) -> Floats:
        starts = self._starts.array()
        at = np.searchsorted(starts, edges, side="right") - 1
        inside = np.clip(edges - starts[at], 0.0, self._lengths.array()[at])
        return np.diff(np.where(at < 0, 0.0, self._before.array()[at] + inside))


class Pile:
    """The spans of one name that overlap: seconds count once for each span."""

    def __init__(self) -> None:
        self._starts, self._ends = Growing(), Growing()
        self._sorted: tuple[Floats, ...] = ()

    def add(self, start: float, end: float) -> None:
        self._starts.append(start)
        self._ends.append(end)
        self._sorted = ()

    def seconds(self, edges: Floats) -> Floats:
        """Time since all starts less time since all ends."""
        if not self._sorted:
            starts, ends = np.sort(self._starts.array()), np.sort(self._ends.array())
            self._sorted = starts, _sums(starts), ends, _sums(ends)
        starts, start_sums, ends, end_sums = self._sorted
        begun, ended = np.searchsorted(starts, edges), np.searchsorted(ends, edges)
        return np.diff(begun * edges - start_sums[begun] - ended * edges + end_sums[ended])


@dataclass(slots=True)
class LaneRow:
    """until: the end of its last span, infinite while that is open. spans, starts: in their order."""

    until: float = -math.inf
    stretches: dict[str, Stretch] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SpanColumns:
    """One row of a lane in a viewport. seconds: of each name in each column. at_once: how many spans may share a
    moment: 1 for a row, the most of any column for a pile or a group of lanes."""

    seconds: dict[str, Floats]
    at_once: float = 1.0


class LaneTrack:
    """The spans of one lane. switches: they follow each other in one row; else rows are filled from the first on."""

    def __init__(self, switches: bool) -> None:
        self._switches = switches
        self._forget()

    def _forget(self) -> None:
        self._rows = [LaneRow()] if self._switches else []
        self._pile: dict[str, Pile] = {}
        self._open: list[tuple[Span, LaneRow | None]] = []
        self._taken = 0
        self._last = self._base = math.nan

    def take(self, spans: Sequence[Span]) -> None:
        """Take in what is new of the lane's spans: those behind the ones taken before, and the ends of open ones.

        All are taken again if they have moved, as they do once the clock of their process is known."""
        if self._taken and (len(spans) < self._taken or spans[self._taken - 1].start != self._last):
            self._forget()
        still = []
        for span, row in self._open:
            if math.isnan(span.end):
                still.append((span, row))
            else:
                self._close(span, row)
        self._open = still
        for span in spans[self._taken :]:
            self._place(span)
        if spans:
            self._taken, self._last = len(spans), spans[-1].start

    def columns(self, edges: Floats, now: float) -> list[SpanColumns]:
        """The rows in the viewport, the pile last. now: where open spans end."""
        if math.isnan(self._base):
            return []
        edges = edges - self._base
        rows = [{name: each.seconds(edges) for name, each in row.stretches.items()} for row in self._rows]
        pile = {name: each.seconds(edges) for name, each in self._pile.items()}
        for span, row in self._open:
            into = pile if row is None else rows[next(i for i, one in enumerate(self._rows) if one is row)]
            start = span.start - self._base
            passed = np.diff(np.clip(edges - start, 0.0, max(0.0, now - span.start)))
            into[span.name] = into[span.name] + passed if span.name in into else passed
        shown = [SpanColumns(row) for row in rows]
        if pile:
            shown.append(SpanColumns(pile, most_at_once(pile, edges)))
        return shown

    def at(self, row: int, time: float) -> Span | None:
        """The span of a row at a moment, the last one before it where nothing is done then; None before the first."""
        if not 0 <= row < len(self._rows):
            return None
        at = bisect_right(self._rows[row].starts, time) - 1
        return self._rows[row].spans[at] if at >= 0 else None

    def _place(self, span: Span) -> None:
        if math.isnan(self._base):
            self._base = span.start
        row = self._rows[0] if self._switches else self._free_row(span.start)
        if row is not None:
            row.spans.append(span)
            row.starts.append(span.start)
        if math.isnan(span.end):
            self._open.append((span, row))
            if row is not None and not self._switches:
                row.until = math.inf
        else:
            self._close(span, row)

    def _free_row(self, start: float) -> LaneRow | None:
        for row in self._rows:
            if row.until <= start + TOUCH_S:
                return row
        if len(self._rows) == MOST_ROWS:
            return None
        self._rows.append(LaneRow())
        return self._rows[-1]

    def _close(self, span: Span, row: LaneRow | None) -> None:
        if row is None:
            pile = self._pile.setdefault(span.name, Pile())
            pile.add(span.start - self._base, max(span.start, span.end) - self._base)
            return
        # Where a clock was set anew, the spans of a row overlap.
        start = span.start if math.isinf(row.until) else max(span.start, row.until)
        end = max(start, span.end)
        row.until = end
        row.stretches.setdefault(span.name, Stretch()).add(start - self._base, end - self._base)


def as_one(lanes: Sequence[list[SpanColumns]], edges: Floats) -> list[SpanColumns]:
    """Several lanes as one row."""
    seconds: dict[str, Floats] = {}
    for row in (row for rows in lanes for row in rows):
        for name, each in row.seconds.items():
            seconds[name] = seconds[name] + each if name in seconds else each
    return [SpanColumns(seconds, most_at_once(seconds, edges))] if seconds else []


def most_at_once(seconds: dict[str, Floats], edges: Floats) -> float:
    """Spans that share a moment, in the fullest column."""
    return max(1.0, float((sum(seconds.values()) / np.diff(edges)).max()))


def shares(columns: SpanColumns, edges: Floats) -> dict[str, npt.NDArray[np.uint8]]:
    """The share of each name in each column, in 255ths of what the row can hold; at least 1 of one that is there."""
    room = np.diff(edges) * columns.at_once
    found = {}
    for name, seconds in columns.seconds.items():
        if (seconds > 0.0).any():
            parts = np.round(255.0 * seconds / room)
            found[name] = np.where(seconds > TOUCH_S / 2, np.clip(parts, 1, 255), 0).astype(np.uint8)
    return found


def _sums(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])
