"""One subscriber's share of a publisher or a relay: its channel, and the thread that sends on it.

      submit(pin, base) ──▸ jobs ──▸ send ║ hash what is pinned ▸ still pinned? ──▸ result "sent"
             future ◂──────────────────── └── broken, late, evicted: result, drop the channel, end

It sends the buckets of a version or, where that is less and the link is slow, deltas to the version that the subscriber
has. It waits only for its own subscriber, each time with the transfer's deadline. When it ends, the subscriber attaches
anew; the publisher and the other senders do not notice.
"""

from __future__ import annotations

import logging
import queue
import select
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from asyncrl.device.streams import SideStream
from asyncrl.errors import DeadlineError, RefusedError, WeightSyncError
from asyncrl.rpc.message import Fields
from asyncrl.rpc.sockets import Wakeup
from asyncrl.sync.channels.channel import Channel, Meeting
from asyncrl.sync.channels.choose import Kind, accept
from asyncrl.sync.channels.listener import ChannelListener
from asyncrl.sync.delta.delta_stream import Deltas, announce, deltas_bytes, send_deltas
from asyncrl.sync.delta.link_speed import LinkSpeed
from asyncrl.sync.plan.plan import SourcePlan
from asyncrl.sync.stream.snapshot import Pin, SnapshotEvictedError
from asyncrl.sync.tensors.bucket import Buffers, send_buckets
from asyncrl.sync.tensors.checksum import ChecksumShare
from asyncrl.sync.tensors.shards import Shards
from asyncrl.telemetry import tracing
from asyncrl.types import Version

log = logging.getLogger(__name__)

HUNG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)
"""The other end of a connection is gone."""

MOST_JOBS = 4
"""Transfers that wait for one subscriber, which takes one at a time."""

COUNTED = ("transfers", "bytes", "failures", "taken_back", "delta_bytes")


class VersionSource(Protocol):
    """The versions that a publisher or a relay can send. Thread-safe."""

    @property
    def device(self) -> torch.device: ...

    def requested_plan(self, wire: Any) -> SourcePlan:
        """The plan in a request. Raises WireError or RefusedError for one that cannot be sent from here."""

    def pin(self, version: Version, who: str) -> Pin | None:
        """Hold a version; None: it is gone. Raises LookupError while it is still to come."""

    def moved(self, pin: Pin) -> None:
        """A bucket has left. Raises SnapshotEvictedError if a newer version needed the memory meanwhile."""

    def release(self, pin: Pin) -> None: ...

    def shards(self, pin: Pin) -> Shards: ...

    def ready(self, pin: Pin, bucket: int, seconds: float) -> None:
        """Wait until that bucket of the plan may be read. Raises SnapshotEvictedError, DeadlineError."""

    def share(self, pin: Pin, plan: SourcePlan, seconds: float) -> ChecksumShare | None:
        """Hash of the plan's part of the pinned version. Raises SnapshotEvictedError, DeadlineError."""

    def deltas(
        self, pin: Pin, base: Version | None, plan: SourcePlan, speed: LinkSpeed, seconds: float
    ) -> Deltas | None:
        """The changes from `base`, which the other end has, to the pinned version, fewer bytes than that; None: send
        all of it. speed: of the link."""


class TransferCounts:
    """Totals of all senders of one server. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, event: str, amount: float = 1) -> None:
        with self._lock:
            self._counts[event] += amount

    def stats(self) -> dict[str, float]:
        """Each of COUNTED, and the ratio of the delta bytes to the full streams that they replaced."""
        with self._lock:
            ratio = self._counts["delta_bytes"] / max(1.0, self._counts["delta_instead_of"])
            return {**{name: self._counts[name] for name in COUNTED}, "delta_bytes_ratio": ratio}


@dataclass(frozen=True, slots=True)
class _Job:
    pin: Pin
    base: Version | None
    result: Future[Fields] = field(default_factory=Future)


class Sender:
    """Sends to one subscriber its part, `plan`, of versions.

    listener: where the subscriber enters its channel, of this kind · meeting: the channel
    """

    def __init__(
        self,
        plan: SourcePlan,
        source: VersionSource,
        kind: Kind,
        listener: ChannelListener,
        meeting: Meeting,
        counts: TransferCounts,
    ) -> None:
        self.who = meeting.whom
        self.pin: Pin | None = None  # set by the server: the version that this subscriber holds
        self.seen_at = time.monotonic()  # set by the server: the last request of this session
        self._plan, self._source, self._kind, self._listener = plan, source, kind, listener
        self._meeting, self._counts = meeting, counts
        self._speed = LinkSpeed()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards `ended`: no job may slip in after the last look at the queue
        self.ended = False
        self._woken = Wakeup()
        self._thread = threading.Thread(target=self._run, name=f"weights to {self.who}", daemon=True)
        self._thread.start()

    def submit(self, pin: Pin, base: Version | None) -> Future[Fields] | None:
        """Send the pinned version. base: the one that the subscriber has whole.

        Returns a future of the acknowledgement, which never gets an exception; None if this sender has ended. Raises
        RefusedError("busy") where MOST_JOBS wait already.
        """
        job = _Job(pin, base)
        with self._lock:
            if self.ended:
                return None
            if self._jobs.qsize() >= MOST_JOBS:
                raise RefusedError("busy", f"{self.who} has {MOST_JOBS} transfers that wait")
            self._jobs.put(job)
            self._woken.set()
        return job.result

    def close(self) -> None:
        """End after the jobs already there. Does not wait."""
        self._listener.close()
        self._jobs.put(None)
        self._woken.set()

    def join(self, seconds: float) -> bool:
        """Whether its thread has ended, after at most `seconds`."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        channel = None
        failure = f"the channel to {self.who} is closed"
        hasher = ThreadPoolExecutor(1, thread_name_prefix=f"hash for {self.who}")
        try:
            channel = accept(self._kind, self._listener, self._meeting)
            with SideStream(self._source.device).entered():
                self._serve(channel, hasher)
        except SnapshotEvictedError:
            self._counts.add("taken_back")
        except (DeadlineError, WeightSyncError) as error:
            failure = str(error)
            self._counts.add("failures")
            # Not the error itself, whose traceback holds the channel.
            log.warning("weights to %s: %s", self.who, failure)
        finally:
            self._end(failure)
            hasher.shutdown(wait=False)
            if channel is not None:
                channel.close()
            self._woken.close()

    def _serve(self, channel: Channel, hasher: Executor) -> None:
        """Training waits for nothing that is queued here: this thread's stream is its own."""
        buffers: Buffers | None = None
        while (job := self._next_job(channel)) is not None:
            if buffers is None:
                buffers = Buffers(self._plan, self._source.shards(job.pin), channel.device)
            version = job.pin.version
            with tracing.span("weights", "send", version=version, generator=self.who) as at_end:
                at_end["bytes"] = self._transfer(job, channel, buffers, hasher)

    def _next_job(self, channel: Channel) -> _Job | None:
        """None: this sender is closed, or the subscriber is gone. A wait without a deadline: it ends with either."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        poll.register(channel.fileno(), HUNG_UP)
        while True:
            with suppress(queue.Empty):
                return self._jobs.get_nowait()
            ready = [fd for fd, _ in poll.poll()]
            if self._woken.fileno() in ready:
                self._woken.clear()
            elif ready:
                log.info("weights to %s: it is gone", self.who)
                return None

    def _transfer(self, job: _Job, channel: Channel, buffers: Buffers, hasher: Executor) -> int:
        """Sets the job's result in any case; raises errors that must end this sender. Returns the bytes sent."""
        deadline = time.monotonic() + self._meeting.deadline_s
        pin, plan, source = job.pin, self._plan, self._source
        fields: Fields = {"status": "failed", "detail": f"{self._meeting.who} failed"}

        def seconds_left() -> float:
            return deadline - time.monotonic()

        try:
            shards = source.shards(pin)
            hashing = hasher.submit(source.share, pin, plan, seconds_left())
            # Half of the time: if the changes are not made by then, the rest must do for the whole version.
            deltas = source.deltas(pin, job.base, plan, self._speed, seconds_left() / 2)
            announce(deltas, channel, seconds_left)
            if deltas is None:
                sent = self._send_full(pin, shards, channel, buffers, seconds_left)
            else:
                sent = self._send_deltas(pin, deltas, channel, seconds_left)
            share = self._hashed(hashing, pin, seconds_left())
            source.moved(pin)  # only a version that was whole to the very end is acknowledged
            fields = {"status": "sent", "share": share, "bytes": sent}
            self._counts.add("transfers")
            self._counts.add("bytes", sent)
            return sent
        except SnapshotEvictedError as error:
            fields = {"status": "gone", "detail": str(error)}
            raise
        except (DeadlineError, WeightSyncError) as error:
            fields = {"status": "failed", "detail": str(error)}
            raise WeightSyncError(f"version {pin.version}: {error}") from error
        finally:
            source.release(pin)
            job.result.set_result(fields)

    def _hashed(
        self, hashing: Future[ChecksumShare | None], pin: Pin, seconds: float
    ) -> ChecksumShare | None:
        try:
            return hashing.result(max(0.0, seconds))
        except TimeoutError:
            what = f"the hash of version {pin.version} for {self.who}"
            raise DeadlineError(self._meeting.who, "its own thread", what, self._meeting.deadline_s) from None

    def _send_full(
        self, pin: Pin, shards: Shards, channel: Channel, buffers: Buffers, seconds_left: Callable[[], float]
    ) -> int:
        """Returns the bytes that were sent."""
        begun, source, plan = time.monotonic(), self._source, self._plan
        send_buckets(
            plan,
            shards,
            channel,
            buffers,
            seconds_left,
            lambda: source.moved(pin),
            lambda index: source.ready(pin, index, seconds_left()),
        )
        self._speed = LinkSpeed.of(plan.bytes, time.monotonic() - begun)
        return plan.bytes

    def _send_deltas(
        self, pin: Pin, deltas: Deltas, channel: Channel, seconds_left: Callable[[], float]
    ) -> int:
        """Returns the bytes that were sent."""
        send_deltas(deltas, channel, seconds_left, lambda: self._source.moved(pin))
        self._counts.add("delta_bytes", deltas_bytes(deltas))
        self._counts.add("delta_instead_of", self._plan.bytes)
        return deltas_bytes(deltas)

    def _end(self, failure: str) -> None:
        with self._lock:
            self.ended = True
        if self.pin is not None:
            self._source.release(self.pin)
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                self._source.release(job.pin)
                job.result.set_result({"status": "failed", "detail": failure})
