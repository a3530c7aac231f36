"""The state of the queue behind the broker, and the form of requests and replies that its handlers work with."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asyncrl.errors import RefusedError
from asyncrl.queue.broker.clock import LeaseClock
from asyncrl.queue.broker.stream import Stream
from asyncrl.queue.broker.trace_intake import TraceIntake
from asyncrl.queue.ledger import generator_commands
from asyncrl.queue.protocol.requests import Request
from asyncrl.queue.storage.records import Record
from asyncrl.queue.storage.store import Frames, PayloadStore
from asyncrl.telemetry import tracing

MAX_STREAMS = 16
MAX_KEYS = 4096
MAX_VALUE = 1 << 20
REGISTRY_BYTES = 1 << 26
STATS_BYTES = 1 << 25
"""Limits on what clients can make the broker keep: streams, keys and workers, bytes of a value; bytes of all keys and
values, and of the stats of all workers."""


class SessionRequest(NamedTuple):
    """A request of a session. frames: its payload."""

    run: str
    session: str
    request: Request
    frames: Frames = ()


class Context(NamedTuple):
    """The circumstances under which a handler gets a request.

    session  the sender as 'name/unique'; leases belong to it
    now      the time of leases (clock.py)
    late     the request has waited as long as it may: the handler must reply
    """

    session: str
    frames: Frames
    now: float
    late: bool

    @property
    def name(self) -> str:
        return self.session.rsplit("/", 1)[0]


class Reply(NamedTuple):
    """value, or error as (kind, reason, detail) with kind 'refused', 'closed' or 'wire'."""

    value: Any = None
    frames: Frames = ()
    error: tuple[str, str, str] | None = None


@dataclass(slots=True)
class QueueState:
    """store: holds the payloads. note: receives every record that the next broker needs.

    registry  the values posted under keys · workers: packed stats of each worker
    posts     counts the changes that requests outside of streams may wait for
    clock     the time of leases
    time      seconds since 1970, to which other processes compare their clocks
    traces    takes the rows of processes that do not share the run folder; None: nobody does
    """

    run: str
    store: PayloadStore = field(default_factory=PayloadStore)
    note: Callable[[Record], None] = lambda record: None
    started_at: float = field(default_factory=time.time)
    closed: str | None = None
    streams: dict[str, Stream] = field(default_factory=dict)
    registry: dict[str, bytes] = field(default_factory=dict)
    workers: dict[str, bytes] = field(default_factory=dict)
    stats_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    posts: int = 0
    clock: LeaseClock = field(default_factory=LeaseClock)
    time: Callable[[], float] = tracing.now
    traces: TraceIntake | None = None

    def stream(self, name: str) -> Stream:
        """A stream exists from the first request that names it."""
        if name not in self.streams and len(self.streams) >= MAX_STREAMS:
            raise RefusedError("full", f"no more than {MAX_STREAMS} streams")
        return self.add_stream(name)

    def add_stream(self, name: str) -> Stream:
        if name not in self.streams:
            self.streams[name] = Stream(name, self.store, lambda record: self.note(record))
        return self.streams[name]

    def expire(self, now: float) -> None:
        for stream in self.streams.values():
            generator_commands.expire(stream.ledger, now)

    def post(self, key: str, value: bytes) -> None:
        """Keep an entry of the registry. RefusedError 'full'."""
        if key not in self.registry and len(self.registry) >= MAX_KEYS:
            raise RefusedError("full", f"the registry holds {MAX_KEYS} keys already")
        check_small("value", value)
        others = sum(len(k) + len(v) for k, v in self.registry.items() if k != key)
        if others + len(key) + len(value) > REGISTRY_BYTES:
            raise RefusedError(
                "full", f"the registry holds {others} bytes of other keys; {REGISTRY_BYTES} are allowed"
            )
        self.registry[key] = value
        self.posts += 1

    def keep_stats(self, worker: str, stats: bytes) -> bool:
        """Keep the stats of a worker in place of its earlier ones. Returns False if there is no room for them."""
        total = self.stats_bytes + len(stats) - len(self.workers.get(worker, b""))
        if total > STATS_BYTES or (worker not in self.workers and len(self.workers) >= MAX_KEYS):
            return False
        self.workers[worker], self.stats_bytes = stats, total
        return True


def check_small(key: str, value: bytes) -> None:
    if len(value) > MAX_VALUE:
        raise RefusedError("full", f"{key} of {len(value)} bytes; {MAX_VALUE} are allowed")
