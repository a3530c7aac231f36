"""The trace of one process: what each of its loops does, moment by moment, in RUN/trace/<process>.jsonl.

    a loop ── Spans ──────▸ LoopLane ─┐
    work beside it ─────────▸ span() ─┼─ one row each, written at once ──▸ RUN/trace/<process>.jsonl
    something that happens ▸ event() ─┤
    figures of now ───────▸ sample() ─┘

A row is in the file when the call returns, so a process that is killed loses none; only spans that began in its last
second may lack. `recording` opens the file; without it every call does nothing. A trace never ends a run: an error of
the disk ends the trace, with one warning.

Rows, with `t` in seconds since 1970 by the clock of this process:

    {"t": …, "process": "generator-0", "role": "generator", "host": "a", "pid": 17}    a process begins; with
                                                           "continues", a file of one that has begun before
    {"t": …, "lane": "engine", "do": "compute"}            from now on this lane does this
    {"t": …, "took": 0.02, "lane": "weights", "do": "fetch", "version": 7}    a span beside others of its lane has ended
    {"t": …, "begin": 3, "lane": "rewards", "do": "score"} such a span that lasts, with the moment at which it began …
    {"t": …, "end": 3, "bytes": 4096}                      … and its end
    {"t": …, "event": "flip", "version": 7}                something happened
    {"t": …, "values": {"queue/ready": 12}}                figures of now
    {"t": …, "clock": [-0.0021, 0.0004]}                   seconds to add to `t` for the clock of the queue; their error
    {"t": …}                                               still alive
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.telemetry.trace_file import FOLDER, TraceFile, holding_write

log = logging.getLogger(__name__)

OTHER = "other"
"""A lane that does nothing with a name."""

RESOLUTION_S = 1e-3
"""A lane's pauses (`OTHER`) below this are not written."""

SHORT_S = 1e-2
"""Spans of scoring, of which a version may have thousands, are not written below this."""

ALIVE_S = 1.0
"""Between two signs of life."""

QUEUE = "queue"
"""The role of the process whose clock is that of the run."""

Row = dict[str, Any]


def _plain(value: Any) -> Any:
    """What JSON does not have: numbers of numpy and torch become plain ones, all else text."""
    return value.item() if hasattr(value, "item") else str(value)


_encode = msgspec.json.Encoder(enc_hook=_plain).encode


class Trace:
    """The trace of one process. most_bytes: at half of it a new file begins, and the one before the last is removed.
    wall: seconds since 1970, by this machine. Raises OSError if no file can be opened."""

    def __init__(
        self,
        folder: Path,
        process: str,
        role: str,
        most_bytes: int,
        wall: Callable[[], float] = time.time,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.process, self.role = process, role
        self._begun: Row = {
            "process": process,
            "role": role,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._anchor = wall() - time.monotonic()
        self._clock: Row | None = None
        self._linked = False
        self._numbers = itertools.count(1)
        self._unwritten: dict[int, Row] = {}
        self._doing: dict[str, str] = {}
        self._lanes: dict[str, LoopLane] = {}
        self._lock = threading.Lock()
        # A disk that hangs must not hang the broker.
        write = os.write if role == QUEUE else holding_write
        self._file = TraceFile(folder, process, most_bytes, self._head, write)
        self._put({"t": round(self.now(), 6), **self._begun})

    @property
    def path(self) -> Path:
        return self._file.path

    def now(self) -> float:
        """Seconds since 1970. They never run backwards."""
        return self._anchor + time.monotonic()

    def write(self, row: Row) -> None:
        with self._lock:
            self._put({"t": round(self.now(), 6), **row})

    def link(self) -> bool:
        """Whether the caller is the first one, which compares this trace's clock with the queue's. The queue's own has
        nothing to compare."""
        first, self._linked = not self._linked, True
        return first and self.role != QUEUE

    def note_clock(self, offset_s: float, error_s: float) -> None:
        """See `set_clock`."""
        with self._lock:
            self._clock = {"clock": [round(offset_s, 6), round(error_s, 6)]}
            self._put({"t": round(self.now(), 6), **self._clock})

    def begin(self, lane: str, name: str, about: Row) -> int:
        """Begin a span; its number, for `end`."""
        with self._lock:
            number = next(self._numbers)
            self._unwritten[number] = {"t": self.now(), "lane": lane, "do": name, **about}
            return number

    def end(self, number: int, least_s: float, about: Row) -> None:
        """least_s: a shorter span is not written"""
        with self._lock:
            now, begun = self.now(), self._unwritten.pop(number, None)
            if begun is None:
                self._put({"t": round(now, 6), "end": number, **about})
            elif (took := now - begun["t"]) >= least_s:
                self._put({**begun, "t": round(now, 6), "took": round(took, 6), **about})

    def switch(self, lane: LoopLane, name: str) -> None:
        """See `LoopLane.do`."""
        with self._lock:
            now = self.now()
            self._lanes[lane.name] = lane
            if name == OTHER:
                lane.paused_at = lane.paused_at or now
                return
            self._write_pause(lane, now)
            lane.paused_at = 0.0
            if self._doing.get(lane.name) != name:
                self._put_lane(lane, name, now)

    def tick(self) -> None:
        """Write pauses that have become long, spans that are open, and a sign of life."""
        with self._lock:
            now = self.now()
            for lane in self._lanes.values():
                self._write_pause(lane, now)
            for number, begun in self._unwritten.items():
                self._put({**begun, "t": round(begun["t"], 6), "begin": number})
            self._unwritten.clear()
            self._put({"t": round(now, 6)})

    def close(self) -> None:
        with self._lock:
            for name in self._doing:
                self._put({"t": round(self.now(), 6), "lane": name, "do": None})
            self._file.close()

    def _write_pause(self, lane: LoopLane, now: float) -> None:
        if lane.paused_at and now - lane.paused_at >= RESOLUTION_S and self._doing.get(lane.name) != OTHER:
            self._put_lane(lane, OTHER, lane.paused_at)

    def _put_lane(self, lane: LoopLane, name: str, at: float) -> None:
        self._doing[lane.name] = name
        self._put({"t": round(at, 6), "lane": lane.name, "do": name})

    def _put(self, row: Row) -> None:
        if self._file.ended:
            return
        try:
            line = _encode(row)
        except Exception as error:  # a value of the user's, e.g. half a surrogate pair in a name
            line = _encode({"t": row["t"], "event": "unwritable", "why": type(error).__name__})
        self._file.append(line + b"\n")

    def _head(self) -> list[bytes]:
        """The first rows of a further file: all that a reader needs who has not seen the one before."""
        now = round(self.now(), 6)
        rows = [{**self._begun, "continues": True}, *([self._clock] if self._clock else [])]
        rows += [{"lane": lane, "do": name} for lane, name in self._doing.items()]
        return [_encode({"t": now, **row}) + b"\n" for row in rows]


class LoopLane:
    """A loop that does one thing at a time. Pauses that are shorter than `RESOLUTION_S` are left out.

    Used by one thread. paused_at: when the pause under way began; 0 in none. The lock of the trace guards it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.paused_at = 0.0

    def do(self, name: str) -> None:
        """The lane does this from now on. name: `OTHER` for nothing in particular"""
        if _trace is not None:
            _trace.switch(self, name)


@contextmanager
def recording(
    run_folder: Path, process: str, role: str, most_mb: int, wall: Callable[[], float] = time.time
) -> Iterator[None]:
    """Inside, this process writes its trace.

    process  its name, which no other process of the run has
    role     generator, learner, queue, a pool's name or launcher
    most_mb  of its files, in MB; 0: none is written
    wall     seconds since 1970, by this machine
    """
    global _trace
    if not most_mb:
        yield
        return
    try:
        trace = Trace(run_folder / FOLDER, process, role, most_mb * 1_000_000, wall)
    except OSError as error:
        log.warning("this process writes no trace: %s", error)
        yield
        return
    ended = threading.Event()
    ticks = threading.Thread(target=_tick, args=(trace, ended), name="trace", daemon=True)
    before, _trace = _trace, trace
    ticks.start()
    try:
        yield
    finally:
        _trace = before
        ended.set()
        ticks.join()
        trace.close()


def _tick(trace: Trace, ended: threading.Event) -> None:
    while not ended.wait(ALIVE_S):
        trace.tick()


class OpenSpan:
    """A span from `begin` to `end`, in any thread."""

    def __init__(self, trace: Trace | None, lane: str, name: str, least_s: float, about: Row) -> None:
        self._trace, self._least_s = trace, least_s
        self._number = 0 if trace is None else trace.begin(lane, name, about)

    def end(self, about: Mapping[str, Any] | None = None) -> None:
        """Once. about: what is known at the end"""
        if self._trace is not None:
            self._trace.end(self._number, self._least_s, dict(about or {}))


def begin(lane: str, name: str, least_s: float = 0.0, **about: Any) -> OpenSpan:
    """Begin a span beside others of the lane. least_s: a shorter one is not written"""
    return OpenSpan(_trace, lane, name, least_s, about)


@contextmanager
def span(lane: str, name: str, least_s: float = 0.0, **about: Any) -> Iterator[Row]:
    """As `begin`, around a block. The mapping that it gets is written at the end."""
    at_end: Row = {}
    opened = begin(lane, name, least_s, **about)
    try:
        yield at_end
    finally:
        opened.end(at_end)


def event(name: str, **about: Any) -> None:
    """Something happened now."""
    if _trace is not None:
        _trace.write({"event": name, **about})


def sample(values: Mapping[str, float]) -> None:
    """Figures of now, by the names of metrics."""
    if _trace is not None:
        _trace.write({"values": dict(values)})


def set_clock(offset_s: float, error_s: float) -> None:
    """The clock of the queue is this process's clock plus `offset_s`, give or take `error_s`."""
    if _trace is not None:
        _trace.note_clock(offset_s, error_s)


def now() -> float:
    """Seconds since 1970 by the clock of the trace, or of the machine where none is written."""
    return time.time() if _trace is None else _trace.now()


def current() -> Trace | None:
    """The trace of this process, if it writes one."""
    return _trace


def _forget() -> None:
    """A forked child has no trace: its thread is gone, and the file is the parent's."""
    global _trace
    _trace = None


_trace: Trace | None = None
os.register_at_fork(after_in_child=_forget)
