"""What the broker answers to each request. No sockets and no clock: the loop is in broker.py.

A request is answered at once, or parked: `answer` returns None, and the broker asks again when `changes` has
moved or the request's wait is over (`late`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import RefusedError, RunClosedError, WireError
from asyncrl.queue import wire
from asyncrl.queue.events import Frontier, StreamSettings
from asyncrl.queue.stream import Frames, Stream

MAX_STREAMS = 16
MAX_KEYS = 4096
MAX_VALUE = 1 << 20
MAX_WAIT_S = 3600.0
"""Limits on what clients can make the broker keep."""


@dataclass(frozen=True, slots=True)
class Request:
    """session: who asks, as 'name/unique'; leases belong to it. frames: the payload behind the envelope."""

    op: str
    run: str
    session: str
    args: Mapping[str, Any]
    frames: Frames = ()

    @property
    def name(self) -> str:
        return self.session.rsplit("/", 1)[0]

    def get(self, key: str, kind: type) -> Any:
        value = self.args.get(key)
        if type(value) is not kind:
            raise WireError(f"{self.op}: {key} = {value!r} must be {kind.__name__}")
        return value

    @property
    def wait_s(self) -> float:
        """How long the request may be parked."""
        value = self.args.get("wait_s", 0.0)
        if type(value) not in (int, float) or not 0 <= value <= MAX_WAIT_S:
            raise WireError(f"{self.op}: wait_s = {value!r} must be from 0 to {MAX_WAIT_S:.0f} seconds")
        return float(value)


@dataclass(frozen=True, slots=True)
class Reply:
    """value, or error as (kind, reason, detail) with kind 'refused', 'closed' or 'wire'."""

    value: Any = None
    frames: Frames = ()
    error: tuple[str, str, str] | None = None


@dataclass(slots=True)
class QueueService:
    run: str
    started_at: float = field(default_factory=time.time)
    closed: str | None = None
    streams: dict[str, Stream] = field(default_factory=dict)
    directory: dict[str, bytes] = field(default_factory=dict)
    workers: dict[str, bytes] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    posts: int = 0

    @property
    def changes(self) -> int:
        """Moves whenever a parked request may have become answerable."""
        return self.posts + sum(stream.changes for stream in self.streams.values())

    def answer(self, request: Request, now: float, late: bool = False) -> Reply | None:
        """The reply, or None to park the request (never when `late`). What is refused is counted."""
        try:
            if request.run != self.run:
                raise RefusedError("wrong_run", f"this queue serves run {self.run!r}, not {request.run!r}")
            handler = OPS.get(request.op)
            if handler is None:
                raise RefusedError("unknown_op", request.op[:64])
            if self.closed is not None and request.op in ENDS_WITH_RUN:
                raise RunClosedError(self.closed)
            return handler(self, request, now, late)
        except RefusedError as error:
            self.refused[error.reason] += 1
            return Reply(error=("refused", error.reason, error.detail))
        except RunClosedError as error:
            return Reply(error=("closed", "", str(error)))
        except WireError as error:
            self.refused["malformed"] += 1
            return Reply(error=("wire", "", str(error)))

    def expire(self, now: float) -> None:
        for stream in self.streams.values():
            stream.ledger.expire(now)

    def stream(self, request: Request) -> Stream:
        name = request.get("stream", str)
        if name not in self.streams:
            if len(self.streams) >= MAX_STREAMS:
                raise RefusedError("full", f"no more than {MAX_STREAMS} streams")
            self.streams[name] = Stream()
        return self.streams[name]

    def _small(self, request: Request, key: str) -> bytes:
        """Packed values are kept and handed on as they came."""
        value: bytes = request.get(key, bytes)
        if len(value) > MAX_VALUE:
            raise RefusedError("full", f"{key} of {len(value)} bytes; {MAX_VALUE} are allowed")
        return value

    # ------------------------------------------------------------------ the run

    def hello(self, request: Request, now: float, late: bool) -> Reply:
        opened = [name for name, s in self.streams.items() if s.ledger.book.settings is not None]
        return Reply({"run": self.run, "streams": opened, "closed": self.closed})

    def goodbye(self, request: Request, now: float, late: bool) -> Reply:
        for stream in self.streams.values():
            stream.ledger.give_back(stream.ledger.leases_of(request.session))
        return Reply()

    def post(self, request: Request, now: float, late: bool) -> Reply:
        key = request.get("key", str)
        if key not in self.directory and len(self.directory) >= MAX_KEYS:
            raise RefusedError("full", f"the directory holds {MAX_KEYS} keys already")
        self.directory[key] = self._small(request, "value")
        self.posts += 1
        return Reply()

    def lookup(self, request: Request, now: float, late: bool) -> Reply | None:
        key = request.get("key", str)
        if key in self.directory:
            return Reply({"found": True, "value": self.directory[key]})
        return Reply({"found": False}) if late else None

    def finish(self, request: Request, now: float, late: bool) -> Reply:
        if self.closed is None:
            self.closed = request.get("reason", str)
            self.posts += 1
            for stream in self.streams.values():
                stream.ledger.finish(self.closed)
        return Reply()

    def status(self, request: Request, now: float, late: bool) -> Reply:
        return Reply(
            {
                "run": self.run,
                "started_at": self.started_at,
                "closed": self.closed,
                "refused": dict(self.refused),
                "workers": self.workers,
                "directory": sorted(self.directory),
                "streams": {name: _stream_status(stream, now) for name, stream in self.streams.items()},
            }
        )

    # ------------------------------------------------------------------ the task feeder

    def room(self, request: Request, now: float, late: bool) -> Reply | None:
        ledger = self.stream(request).ledger
        wanted = ledger.room()
        return Reply([ledger.book.next, wanted]) if wanted or late else None

    def submit(self, request: Request, now: float, late: bool) -> Reply | None:
        stream = self.stream(request)
        if stream.ledger.book.settings is None and not late:
            return None
        tasks = request.get("tasks", list)
        for at, entry in enumerate(tasks):
            ok = isinstance(entry, list) and len(entry) == 2 and type(entry[1]) is bytes
            if not ok or type(entry[0]) is not int or entry[0] != tasks[0][0] + at or entry[0] < 0:
                raise WireError("submit: tasks must be [ordinal, bytes] with consecutive ordinals")
        stream.submit([(ordinal, packed) for ordinal, packed in tasks], request.get("min_version", int))
        return Reply()

    def exhaust(self, request: Request, now: float, late: bool) -> Reply:
        self.stream(request).ledger.exhaust(request.get("at", int))
        return Reply()

    # ------------------------------------------------------------------ generators

    def lease(self, request: Request, now: float, late: bool) -> Reply | None:
        stream = self.stream(request)
        held, lineage, most = (request.get(key, int) for key in ("held", "lineage", "most"))
        if stream.ledger.book.settings is None:
            return Reply([]) if late else None
        grants = stream.ledger.lease(request.session, held, lineage, most, now)
        if not grants and not late:
            return None
        return Reply([[g.ordinal, g.epoch, stream.task(g.ordinal)] for g in grants])

    def renew(self, request: Request, now: float, late: bool) -> Reply:
        lost: list[list[Any]] = []
        for name, pairs in request.get("leases", dict).items():
            stream, leases = self.streams.get(name), _leases(pairs)
            gone = leases if stream is None else stream.ledger.renew(leases, now)
            lost += [[name, ordinal, epoch] for ordinal, epoch in gone]
        stats = self._small(request, "stats")
        if request.name in self.workers or len(self.workers) < MAX_KEYS:
            self.workers[request.name] = stats
        return Reply({"lost": lost, "closed": self.closed is not None})

    def commit(self, request: Request, now: float, late: bool) -> Reply:
        keys = ("ordinal", "epoch", "tokens", "start_version", "digest")
        ordinal, epoch, tokens, start_version, digest = (request.get(key, int) for key in keys)
        nbytes, received = request.get("nbytes", int), sum(len(frame) for frame in request.frames)
        if not request.frames or nbytes != received:
            raise WireError(f"commit of ordinal {ordinal}: {received} payload bytes, {nbytes} announced")
        self.stream(request).commit(ordinal, epoch, tokens, start_version, digest, request.frames)
        return Reply()

    def give_back(self, request: Request, now: float, late: bool) -> Reply:
        self.stream(request).ledger.give_back(_leases(request.args.get("leases")))
        return Reply()

    def drop(self, request: Request, now: float, late: bool) -> Reply:
        ordinal, epoch = request.get("ordinal", int), request.get("epoch", int)
        self.stream(request).ledger.drop(ordinal, epoch, request.get("reason", str)[:64])
        return Reply()

    # ------------------------------------------------------------------ the learner

    def open(self, request: Request, now: float, late: bool) -> Reply:
        """All streams of a run share one lineage: a rewind of one forks the others."""
        stream = self.stream(request)
        try:
            settings = StreamSettings.from_wire(request.get("settings", dict))
            snapshot = request.args.get("snapshot")
            frontier = None if snapshot is None else Frontier.from_wire(wire.unpack(snapshot))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise WireError(f"open: {error}") from error
        lineages = [s.ledger.book.lineage for s in self.streams.values()]
        stream.ledger.open(settings, frontier, max(lineages))
        book = stream.ledger.book
        for other in self.streams.values():
            if other.ledger.book.settings is not None:
                other.ledger.fork(book.lineage)
        return Reply({"learner_epoch": book.learner_epoch, "lineage": book.lineage, "version": book.version})

    def claim(self, request: Request, now: float, late: bool) -> Reply | None:
        stream = self.stream(request)
        keys = ("learner_epoch", "step", "index", "rank", "max_tokens")
        epoch, step, index, rank, max_tokens = (request.get(key, int) for key in keys)
        claimed = stream.ledger.claim(epoch, step, index, rank, max_tokens, request.get("whole", bool))
        if claimed is None:
            return Reply() if late else None
        groups = stream.payloads(claimed.ordinals)
        value = {"groups": [len(g) for g in groups], "last": claimed.last, "so_far": claimed.so_far}
        return Reply(value, _flat(groups))

    def trained(self, request: Request, now: float, late: bool) -> Reply:
        ledger = self.stream(request).ledger
        version = ledger.trained(request.get("learner_epoch", int), request.get("step", int))
        return Reply({"version": version, "stats": self.workers, "depth": ledger.counts(now)})

    def reject(self, request: Request, now: float, late: bool) -> Reply:
        epoch, step = request.get("learner_epoch", int), request.get("step", int)
        return Reply(self.stream(request).ledger.reject(epoch, step, request.get("reason", str)[:64]))

    def collect(self, request: Request, now: float, late: bool) -> Reply | None:
        groups = self.stream(request).collect(request.get("learner_epoch", int))
        if not groups and not late:
            return None
        return Reply({"groups": [len(g) for g in groups]}, _flat(groups))

    def snapshot(self, request: Request, now: float, late: bool) -> Reply:
        frontier = self.stream(request).ledger.frontier(request.get("learner_epoch", int))
        return Reply(wire.pack(frontier.to_wire()))


Handler = Callable[[QueueService, Request, float, bool], "Reply | None"]

RUN_OPS = ("hello", "goodbye", "post", "lookup", "finish", "status", "renew", "give_back")
ENDS_WITH_RUN = frozenset(
    (
        *("room", "submit", "exhaust", "lease", "commit", "drop"),
        *("open", "claim", "trained", "reject", "collect", "snapshot"),
    )
)
OPS: dict[str, Handler] = {op: getattr(QueueService, op) for op in (*RUN_OPS, *sorted(ENDS_WITH_RUN))}


def _leases(pairs: Any) -> list[tuple[int, int]]:
    if not isinstance(pairs, list):
        raise WireError(f"leases must be a list, not {type(pairs).__name__}")
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or any(type(number) is not int for number in pair):
            raise WireError(f"a lease is [ordinal, epoch], not {pair!r}")
    return [(ordinal, epoch) for ordinal, epoch in pairs]


def _flat(groups: list[Frames]) -> list[Any]:
    return [frame for group in groups for frame in group]


def _stream_status(stream: Stream, now: float) -> dict[str, Any]:
    book = stream.ledger.book
    return {
        **stream.ledger.counts(now),
        "version": book.version,
        "lineage": book.lineage,
        "learner_epoch": book.learner_epoch,
        "next_ordinal": book.next,
        "settings": None if book.settings is None else book.settings.to_wire(),
    }
