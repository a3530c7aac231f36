"""The decisions of one process that no other data of its run determines, in RUN/decisions/, for `asyncrl replay`.

    engine   ─ steps, requests that join and leave, flips ────┐
    worker   ─ versions to flip to, parts of earlier leases ──┼─▸ buffer ── flush ──▸ <process>.<n>.msgpack
    learner  ─ the groups of each version, a hash of weights ─┘      before anything that came of them leaves

`recording` opens the file; without it every call does nothing. A file is of one life of a process: a map about it,
then items of msgpack in their order.

    3, -2                            so many steps of the engine; below 0: no sample may begin in them
    [1, 1]                           a request joins the batch: its name, see `RequestNames`
    ["add", id] ["remove", id]       one of another name joins, one leaves unfinished
    ["weights", lineage, version]    the version of the next flip
    ["flip", recompute]              it is live from the next step on
    ["kept", id, frames]             parts of the task of this request that came with its lease
    ["evaluate", id, set, start, stop]    the held-out tasks of this request
    ["threads", n]                   threads of a computation, from here on
    ["begun", version, lineage, weights]    the learner begins with this version; a hash of its weights
    ["trained", …]                   see `TrainedVersion`
    ["saved", version]               a checkpoint of this version begins

An error of the disk ends the file, with one warning: it never ends a run.
"""

from __future__ import annotations

import itertools
import logging
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import msgspec

from asyncrl.telemetry.trace_file import holding_write
from asyncrl.types import EVAL, TRAIN, Version

log = logging.getLogger(__name__)

FOLDER, SUFFIX = "decisions", ".msgpack"

FORMAT = 1
"""The format of the items, in the map at the beginning of a file."""

MOST_BUFFERED = 1 << 16
"""Bytes that are written at once, whether or not anything leaves the process."""

ENTRIES = {
    "add": 1,
    "remove": 1,
    "weights": 2,
    "flip": 1,
    "kept": 2,
    "evaluate": 4,
    "threads": 1,
    "begun": 3,
    "trained": 7,
    "saved": 1,
}
"""Values of an item, by its kind."""

_encode = msgspec.msgpack.Encoder().encode


class ClaimedGroup(NamedTuple):
    """A group in training. mark: 16 bits of a hash of its tokens, log-probs, versions and rewards: which group it was,
    if its task was rolled out more than once"""

    ordinal: int
    mark: int


@dataclass(frozen=True, slots=True)
class TrainedVersion:
    """One version's training, as the learner records it.

    version  that it published, or would have
    refused  whether its last optimizer step was refused, so that nothing was published
    weights  a hash of the weights after it
    norm     the gradient norm of the policy
    claims   the groups, claim by claim, in their order
    """

    version: Version
    refused: bool
    weights: int
    norm: float
    claims: Sequence[Sequence[ClaimedGroup]]

    def to_wire(self) -> list[Any]:
        flat = [one for claim in self.claims for one in claim]
        ordinals = [one.ordinal for one in flat]
        steps = [after - before for before, after in itertools.pairwise([0, *ordinals])]
        marks = struct.pack(f"<{len(flat)}H", *(one.mark for one in flat))
        sizes = [len(claim) for claim in self.claims]
        return ["trained", self.version, self.refused, self.weights, self.norm, sizes, steps, marks]

    @staticmethod
    def from_wire(item: Sequence[Any]) -> TrainedVersion:
        _, version, refused, weights, norm, sizes, steps, packed = item
        marks = struct.unpack(f"<{len(steps)}H", packed)
        flat = map(ClaimedGroup, itertools.accumulate(steps), marks)
        return TrainedVersion(
            version, refused, weights, norm, [[*itertools.islice(flat, size)] for size in sizes]
        )


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a process, as its file has it. about: the map at its beginning · items: each a tuple whose first
    entry is its kind; steps are ("step", n, whether samples may begin), and all requests that join are ("add", id)"""

    process: str
    number: int
    about: Mapping[str, Any]
    items: Sequence[tuple[Any, ...]]

    @property
    def name(self) -> str:
        return f"{self.process}.{self.number}"

    @property
    def role(self) -> str:
        return str(self.about["role"])


STREAMS = TRAIN, EVAL, "probe"
"""First words of the names of requests; all others are numbers."""


class RequestNames:
    """The names of requests as small numbers: the stream, then each number less that of the request before, of the same
    stream. The commonest, of training and with two numbers, goes without the stream. Writer and reader have one each.

    >>> writer, reader = RequestNames(), RequestNames()
    >>> [writer.short(name) for name in ("train/4/5", "train/5/6/0/28", "sub-agent/1")]
    [[4, 5], [0, 1, 1, 0, 28], None]
    >>> [reader.whole(short) for short in ([4, 5], [0, 1, 1, 0, 28])]
    ['train/4/5', 'train/5/6/0/28']
    """

    def __init__(self) -> None:
        self._before: list[list[int]] = [[] for _ in STREAMS]

    def short(self, name: str) -> list[int] | None:
        """The numbers; None for a name of another form."""
        stream, *texts = name.split("/")
        if stream not in STREAMS or len(texts) < 2 or not all(text.isdecimal() for text in texts):
            return None
        number, numbers = STREAMS.index(stream), [int(text) for text in texts]
        before, self._before[number] = self._before[number], numbers
        steps = [now - then for now, then in zip(numbers, _padded(before, numbers), strict=True)]
        return steps if number == 0 and len(steps) == 2 else [number, *steps]

    def whole(self, short: Sequence[int]) -> str:
        number, *steps = short if len(short) > 2 else (0, *short)
        before = self._before[number]
        numbers = [then + step for step, then in zip(steps, _padded(before, steps), strict=True)]
        self._before[number] = numbers
        return "/".join([STREAMS[number], *map(str, numbers)])


def _padded(before: Sequence[int], like: Sequence[int]) -> list[int]:
    """With zeros behind it, or cut, to the length of another."""
    return [*before, *[0] * len(like)][: len(like)]


class DecisionLog:
    """Writes the file of this process. Any thread may call it. Raises OSError if the file cannot be opened."""

    def __init__(self, folder: Path, process: str, about: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = _open_new(folder, process)
        self._buffer = bytearray(_encode(dict(about)))
        self._steps = 0
        self._names = RequestNames()
        self._lock = threading.Lock()

    def step(self, admit: bool) -> None:
        """The engine makes a step. admit: samples may begin in it"""
        with self._lock:
            if self._steps and (self._steps > 0) != admit:
                self._put_steps()
            self._steps += 1 if admit else -1

    def joined(self, request_id: str) -> None:
        """A request has joined the engine's batch."""
        with self._lock:
            self._put(self._names.short(request_id) or ["add", request_id])

    def note(self, *item: Any) -> None:
        with self._lock:
            self._put(item)

    def flush(self) -> None:
        """Write what is buffered: it outlives a kill of this process, not one of its machine."""
        with self._lock:
            self._put_steps()
            self._write()

    def close(self) -> None:
        self.flush()
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _put_steps(self) -> None:
        if self._steps:
            self._buffer += _encode(self._steps)
            self._steps = 0

    def _put(self, item: Any) -> None:
        self._put_steps()
        self._buffer += _encode(item)
        if len(self._buffer) >= MOST_BUFFERED:
            self._write()

    def _write(self) -> None:
        data = memoryview(bytes(self._buffer))
        self._buffer.clear()
        try:
            while data and self._file >= 0:
                data = data[holding_write(self._file, data.tobytes()) :]
        except OSError as error:
            log.warning("this run cannot be replayed, its decisions are not written any more: %s", error)
            os.close(self._file)
            self._file = -1


def _open_new(folder: Path, process: str) -> int:
    """A file of its own for this life of the process."""
    for number in itertools.count():
        try:
            path = folder / f"{process}.{number}{SUFFIX}"
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except FileExistsError:
            continue
    raise AssertionError


@contextmanager
def recording(folder: Path, process: str, about: Mapping[str, Any]) -> Iterator[None]:
    """Inside, this process records its decisions.

    folder   RUN/decisions
    process  its name, which no other process of the run has
    about    the map at the beginning of the file
    """
    global _log
    try:
        opened = DecisionLog(folder, process, about)
    except OSError as error:
        log.warning("this run cannot be replayed, the file of its decisions does not open: %s", error)
        yield
        return
    before, _log = _log, opened
    try:
        yield
    finally:
        _log = before
        opened.close()


def recorded() -> bool:
    """Whether this process records its decisions."""
    return _log is not None


def step(admit: bool) -> None:
    """See `DecisionLog.step`."""
    if _log is not None:
        _log.step(admit)


def joined(request_id: str) -> None:
    """See `DecisionLog.joined`."""
    if _log is not None:
        _log.joined(request_id)


def note(*item: Any) -> None:
    """Record an item, see the module."""
    if _log is not None:
        _log.note(*item)


def flush() -> None:
    """Before anything that came of the decisions so far leaves this process."""
    if _log is not None:
        _log.flush()


def read_lives(folder: Path) -> list[Life]:
    """All lives of all processes, by name and number. An item that a kill has cut off is left out, and a life that had
    written nothing.

    Raises OSError, and ValueError for a file of another kind.
    """
    lives = []
    for path in folder.glob(f"*{SUFFIX}"):
        process, _, number = path.name.removesuffix(SUFFIX).rpartition(".")
        lives.append(_life(process, int(number), path.read_bytes()))
    return sorted((life for life in lives if life.about), key=lambda life: (life.process, life.number))


def _life(process: str, number: int, data: bytes) -> Life:
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(data)
    about: Any = next(unpacker, {})
    if not isinstance(about, dict):
        raise ValueError(f"the file of {process}.{number} does not begin with a map")
    items: list[tuple[Any, ...]] = []
    names = RequestNames()
    for item in unpacker:
        match item:
            case int(steps):
                items.append(("step", abs(steps), steps > 0))
            case [int(), *_]:
                items.append(("add", names.whole(item)))
            case [str(kind), *values] if ENTRIES.get(kind) == len(values):
                items.append((kind, *values))
            case _:
                raise ValueError(f"{process}.{number} has an unknown item: {str(item)[:80]}")
    return Life(process, number, about, items)


def _forget() -> None:
    """A forked child records nothing: the file is the parent's."""
    global _log
    _log = None


_log: DecisionLog | None = None
os.register_at_fork(after_in_child=_forget)
