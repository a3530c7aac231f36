"""What the broker answers to each request. No sockets and no clock.

A request is answered at once, or it waits: `answer` returns None, and the dispatcher calls it again when the `changes`
of its stream (for a lookup: `posts`) have moved, or when the request's wait is over (`late`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from asyncrl.errors import RefusedError, RunClosedError, WireError
from asyncrl.queue.broker.records import Closed, Posted, Record
from asyncrl.queue.broker.stream import Content, Stream, ignore
from asyncrl.queue.ledger.events import Frontier, StreamSettings
from asyncrl.queue.ledger.settings import check_names
from asyncrl.queue.ledger.task_record import State
from asyncrl.queue.storage.store import Frames, PayloadStore
from asyncrl.queue.wire import wire

MAX_STREAMS = 16
MAX_KEYS = 4096
MAX_VALUE = 1 << 20
MAX_TEXT = 4096
MAX_WAIT_S = 3600.0
MAX_REASON = 64
"""Limits on what clients can make the broker keep."""


class Request(NamedTuple):
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
            raise WireError(f"{self.op}: {key} = {value!r:.100} must be {kind.__name__}")
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise WireError(f"{self.op}: {key} has {len(value)} characters; {MAX_TEXT} are allowed")
        return value

    def maybe(self, key: str, *kinds: type) -> Any:
        """Of one of these kinds, or None if it is not there."""
        value = self.args.get(key)
        if value is not None and type(value) not in kinds:
            raise WireError(f"{self.op}: {key} = {value!r} must be {' or '.join(k.__name__ for k in kinds)}")
        return value

    def numbers(self, *keys: str) -> list[int]:
        values: list[Any] = [self.args.get(key) for key in keys]
        return values if {*map(type, values)} == {int} else [self.get(key, int) for key in keys]

    def ordinals(self, key: str) -> list[int]:
        """A list of them; none if it is not there."""
        value = self.maybe(key, list) or []
        if any(type(ordinal) is not int for ordinal in value):
            raise WireError(f"{self.op}: {key} = {value!r:.100} must be ordinals")
        return value

    def reason(self) -> str:
        return self.get("reason", str)[:MAX_REASON]

    def payload(self) -> Frames:
        """The frames behind the envelope, which must be as long as `nbytes` says."""
        nbytes, received = self.get("nbytes", int), sum(map(len, self.frames))
        if nbytes != received:
            raise WireError(f"{self.op}: {received} payload bytes, {nbytes} announced")
        return self.frames

    @property
    def wait_s(self) -> float:
        """How long the request may be parked."""
        value = self.args.get("wait_s", 0.0)
        if type(value) not in (int, float) or not 0 <= value <= MAX_WAIT_S:
            raise WireError(f"{self.op}: wait_s = {value!r} must be from 0 to {MAX_WAIT_S:.0f} seconds")
        return float(value)


class Reply(NamedTuple):
    """value, or error as (kind, reason, detail) with kind 'refused', 'closed' or 'wire'."""

    value: Any = None
    frames: Frames = ()
    error: tuple[str, str, str] | None = None


@dataclass(slots=True)
class QueueService:
    """store: where the payloads are. note: told of everything that a broker which comes next must know."""

    run: str
    store: PayloadStore = field(default_factory=PayloadStore)
    note: Callable[[Record], None] = ignore
    started_at: float = field(default_factory=time.time)
    closed: str | None = None
    streams: dict[str, Stream] = field(default_factory=dict)
    directory: dict[str, bytes] = field(default_factory=dict)
    workers: dict[str, bytes] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    posts: int = 0

    def answer(self, request: Request, now: float, late: bool = False) -> Reply | None:
        """The reply, or None to park the request (never when `late`). What is refused is counted."""
        try:
            if request.run != self.run and request.op not in OF_ANY_RUN:
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
        if name not in self.streams and len(self.streams) >= MAX_STREAMS:
            raise RefusedError("full", f"no more than {MAX_STREAMS} streams")
        return self.add_stream(name)

    def add_stream(self, name: str) -> Stream:
        """It is there from the first time that somebody names it."""
        if name not in self.streams:
            self.streams[name] = Stream(name, self.store, lambda record: self.note(record))
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
        self.note(Posted(key, self.directory[key]))
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
            self.note(Closed(self.closed))
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
                "store": asdict(self.store.sizes()),
                "directory": sorted(self.directory),
                "streams": {name: _stream_status(stream, now) for name, stream in self.streams.items()},
            }
        )

    def peek(self, request: Request, now: float, late: bool) -> Reply:
        """Where an ordinal stands, and its group if there is one. For people: nothing changes."""
        name, ordinal = request.get("stream", str), request.get("ordinal", int)
        stream = self.streams.get(name)
        item = None if stream is None else stream.ledger.book.items.get(ordinal)
        if stream is None or item is None:
            raise RefusedError(
                "unknown", f"stream {name!r} has no task {ordinal}: not submitted yet, or it has ended"
            )
        lease = stream.ledger.book.leases.get(ordinal, item.epoch)
        value = {
            "state": item.state.value,
            "task": stream.tasks.get(ordinal),
            "worker": lease.worker.rsplit("/", 1)[0] if lease else None,
            "since_s": now - lease.at if lease else None,
        }
        made = item.state in (State.READY, State.CLAIMED, State.RECORDED) and not item.lost
        return _groups(stream.contents([ordinal]) if made else [], value)

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
        held, lineage, most = request.numbers("held", "lineage", "most")
        if stream.ledger.book.settings is None:
            return Reply([]) if late else None
        grants = stream.ledger.lease(request.session, held, lineage, most, now)
        if not grants and not late:
            return None
        finished = [stream.finished_of(grant.ordinal) for grant in grants]
        value = [
            [grant.ordinal, grant.epoch, stream.task(grant.ordinal), len(frames)]
            for grant, frames in zip(grants, finished, strict=True)
        ]
        return Reply(value, [frame for frames in finished for frame in frames])

    def progress(self, request: Request, now: float, late: bool) -> Reply:
        ordinal, epoch = request.numbers("ordinal", "epoch")
        self.stream(request).progress(ordinal, epoch, request.payload())
        return Reply()

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
        ordinal, epoch, tokens, start_version, digest = request.numbers(*keys)
        columns, squares = _column_names(request.maybe("columns", list)), request.maybe("squares", int) or 0
        frames = request.payload()
        if not frames:
            raise WireError(f"commit of ordinal {ordinal}: no payload")
        stream = self.stream(request)
        stream.commit(ordinal, epoch, tokens, start_version, digest, columns, frames, squares)
        return Reply()

    def give_back(self, request: Request, now: float, late: bool) -> Reply:
        self.stream(request).ledger.give_back(_leases(request.args.get("leases")))
        return Reply()

    def drop(self, request: Request, now: float, late: bool) -> Reply:
        ordinal, epoch = request.numbers("ordinal", "epoch")
        self.stream(request).ledger.drop(ordinal, epoch, request.reason())
        return Reply()

    # ------------------------------------------------------------------ stages

    def stage_lease(self, request: Request, now: float, late: bool) -> Reply | None:
        stream, stage = self.stream(request), request.get("stage", str)
        if stream.ledger.book.settings is None:
            return Reply([]) if late else None
        grants = stream.ledger.stage_lease(stage, request.session, request.get("most", int), now)
        if not grants and not late:
            return None
        contents = stream.contents([grant.ordinal for grant in grants])
        value = [
            [grant.ordinal, grant.epoch, len(content.group), content.columns]
            for grant, content in zip(grants, contents, strict=True)
        ]
        return Reply(value, _flat(contents))

    def stage_commit(self, request: Request, now: float, late: bool) -> Reply:
        ordinal, epoch, version, digest = request.numbers("ordinal", "epoch", "version", "digest")
        stream, stage = self.stream(request), request.get("stage", str)
        stream.stage_commit(stage, ordinal, epoch, version, digest, request.payload())
        return Reply()

    def stage_drop(self, request: Request, now: float, late: bool) -> Reply:
        ordinal, epoch = request.numbers("ordinal", "epoch")
        ledger, stage = self.stream(request).ledger, request.get("stage", str)
        ledger.stage_drop(stage, ordinal, epoch, request.reason())
        return Reply()

    # ------------------------------------------------------------------ the learner

    def drain(self, request: Request, now: float, late: bool) -> Reply:
        return Reply(self.stream(request).ledger.drain())

    def open(self, request: Request, now: float, late: bool) -> Reply:
        """All streams of a run share one lineage: a rewind of one forks the others."""
        stream, call = self.stream(request), request.maybe("call", int)
        try:
            settings = StreamSettings.from_wire(request.get("settings", dict))
            snapshot = request.args.get("snapshot")
            frontier = None if snapshot is None else Frontier.from_wire(wire.unpack(snapshot))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise WireError(f"open: {error}") from error
        lineages = [s.ledger.book.lineage for s in self.streams.values()]
        opener = "" if call is None else f"{request.session} {call}"
        stream.ledger.open(settings, frontier, max(lineages), opener)
        book = stream.ledger.book
        for other in self.streams.values():
            if other.ledger.book.settings is not None:
                other.ledger.fork(book.lineage)
        return Reply({"learner_epoch": book.learner_epoch, "lineage": book.lineage, "version": book.version})

    def claim(self, request: Request, now: float, late: bool) -> Reply | None:
        stream = self.stream(request)
        keys = ("learner_epoch", "step", "index", "rank", "max_tokens")
        epoch, step, index, rank, max_tokens = request.numbers(*keys)
        whole, attempt = request.get("whole", bool), request.maybe("attempt", int)
        claimed = stream.ledger.claim(epoch, step, index, rank, max_tokens, whole, attempt)
        if claimed is None:
            return Reply() if late else None
        value = {"last": claimed.last, "so_far": claimed.so_far, "attempt": claimed.attempt}
        return _groups(stream.contents(claimed.ordinals), value)

    def trained(self, request: Request, now: float, late: bool) -> Reply:
        ledger = self.stream(request).ledger
        epoch, step = request.numbers("learner_epoch", "step")
        version = ledger.trained(epoch, step, request.maybe("waited", float))
        return Reply({"version": version, "stats": self.workers, "depth": ledger.counts(now)})

    def reject(self, request: Request, now: float, late: bool) -> Reply:
        epoch, step = request.numbers("learner_epoch", "step")
        return Reply(self.stream(request).ledger.reject(epoch, step, request.reason()))

    def abandon(self, request: Request, now: float, late: bool) -> Reply:
        epoch, step, attempt = request.numbers("learner_epoch", "step", "attempt")
        ledger, dropped = self.stream(request).ledger, request.ordinals("dropped")
        return Reply(ledger.abandon(epoch, step, attempt, dropped, request.reason()))

    def checkpointed(self, request: Request, now: float, late: bool) -> Reply:
        epoch, version = request.numbers("learner_epoch", "version")
        self.stream(request).ledger.checkpointed(epoch, version)
        return Reply()

    def collect(self, request: Request, now: float, late: bool) -> Reply | None:
        got, corrupt = (request.ordinals(key) for key in ("got", "corrupt"))
        contents = self.stream(request).collect(request.get("learner_epoch", int), got, corrupt)
        return _groups(contents, {}) if contents or late else None

    def snapshot(self, request: Request, now: float, late: bool) -> Reply:
        frontier = self.stream(request).ledger.frontier(request.get("learner_epoch", int))
        return Reply(wire.pack(frontier.to_wire()))


Handler = Callable[[QueueService, Request, float, bool], "Reply | None"]

RUN_OPS = ("hello", "goodbye", "post", "lookup", "finish", "status", "peek", "renew", "give_back")
OF_ANY_RUN = ("status", "goodbye")
"""An operator may ask what runs here."""

ENDS_WITH_RUN = frozenset(
    (
        *("room", "submit", "exhaust", "drain"),
        *("lease", "progress", "commit", "drop", "stage_lease", "stage_commit", "stage_drop"),
        *("open", "claim", "trained", "reject", "abandon", "checkpointed", "collect", "snapshot"),
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


def _column_names(names: list[Any] | None) -> tuple[str, ...]:
    try:
        check_names("columns", tuple(names or ()))
    except (TypeError, ValueError) as error:
        raise WireError(f"commit: {error}") from error
    return tuple(names or ())


def _groups(contents: list[Content], value: dict[str, Any]) -> Reply:
    counts = {
        "ordinals": [content.ordinal for content in contents],
        "groups": [len(content.group) for content in contents],
        "columns": [content.columns for content in contents],
    }
    return Reply({**counts, **value}, _flat(contents))


def _flat(contents: list[Content]) -> list[Any]:
    return [frame for content in contents for frame in content.frames]


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
