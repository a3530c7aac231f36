"""One generator's share of a publisher or a relay: its channel and the thread that sends on it.

      submit(request, pin) ──▸ jobs ──▸ send ║ hash what is pinned ▸ still pinned? ──▸ answer "sent"
                                             └── broken, late, taken back: answer, drop the channel, end

What is sent are the version's buckets, or, where that is less and the link is slow, deltas to the version that the
generator says it has. Waits only for its own generator, each time with the transfer's deadline. When it ends, the
generator attaches anew; the publisher and the other senders do not notice.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncrl.errors import DeadlineError, WeightSyncError
from asyncrl.rpc.message import Fields
from asyncrl.rpc.server import RpcRequest
from asyncrl.sync.channels.transport import Channel
from asyncrl.sync.delta.delta_stream import Deltas, announce, deltas_bytes, send_deltas
from asyncrl.sync.plan.plan import SourcePlan
from asyncrl.sync.stream.snapshot import Pin, SnapshotEvictedError
from asyncrl.sync.tensors.bucket import Buffers, Shards, send_buckets
from asyncrl.sync.tensors.checksum import ChecksumShare
from asyncrl.types import Version

log = logging.getLogger(__name__)


FAST_BYTES_S, LATENCY_S = 1e9, 0.05
"""A link that takes longer for a full stream is slow. Deltas are made at about that speed by one core."""


class BufferSource(Protocol):
    """What a sender needs of its publisher or relay."""

    name: str

    def shards(self, pin: Pin) -> Shards: ...

    def ready(self, pin: Pin, bucket: int, seconds: float) -> None: ...

    def share(self, pin: Pin, source: SourcePlan, seconds: float) -> ChecksumShare | None: ...

    def deltas(
        self, pin: Pin, base: Version | None, source: SourcePlan, slow: bool, seconds: float
    ) -> Deltas | None: ...

    def moved(self, pin: Pin) -> None: ...

    def release(self, pin: Pin) -> None: ...

    def answer(self, request: RpcRequest, fields: Fields) -> None: ...

    def count(self, event: str, amount: float = 1) -> None: ...


@dataclass(frozen=True, slots=True)
class _Job:
    request: RpcRequest
    pin: Pin


class Sender:
    def __init__(
        self,
        who: str,
        source: SourcePlan,
        shelf: BufferSource,
        open_channel: Callable[[], Channel],
        deadline_s: float,
    ) -> None:
        self.who = who
        self.pin: Pin | None = None  # the publisher's field: what this generator asked to hold
        self._source, self._shelf, self._open_channel = source, shelf, open_channel
        self._deadline_s = deadline_s
        self._slow = False  # by the last full stream
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _ended: no job may slip in after the last look at the queue
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"weights to {who}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return self._ended

    def submit(self, request: RpcRequest, pin: Pin) -> bool:
        """Send the pinned version and answer the request; False when this sender has ended."""
        with self._lock:
            if not self._ended:
                self._jobs.put(_Job(request, pin))
            return not self._ended

    def close(self) -> None:
        """End after the jobs already there. Does not wait."""
        self._jobs.put(None)

    def join(self, seconds: float) -> bool:
        """Whether its thread has ended, after at most `seconds`."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        channel = None
        failure = f"the channel to {self.who} is closed"
        hasher = ThreadPoolExecutor(1, thread_name_prefix=f"hash for {self.who}")
        try:
            channel = self._open_channel()
            buffers: Buffers | None = None
            while (job := self._jobs.get()) is not None:
                if buffers is None:
                    buffers = Buffers(self._source, self._shelf.shards(job.pin), channel.device)
                self._transfer(job, channel, buffers, hasher)
        except SnapshotEvictedError:
            self._shelf.count("taken_back")
        except (DeadlineError, WeightSyncError) as error:
            failure = str(error)
            self._shelf.count("failures")
            log.warning("weights to %s: %s", self.who, error)
        finally:
            self._end(failure)
            hasher.shutdown(wait=False)
            if channel is not None:
                channel.close()

    def _transfer(self, job: _Job, channel: Channel, buffers: Buffers, hasher: Executor) -> None:
        """Answers in any case; raises what must end this sender."""
        begun = time.monotonic()
        pin, shelf = job.pin, self._shelf
        fields: Fields = {"status": "failed", "detail": f"{shelf.name} failed"}

        def seconds_left() -> float:
            return begun + self._deadline_s - time.monotonic()

        try:
            shards = shelf.shards(pin)
            if shards.device.type == "cuda":
                torch.cuda.set_device(shards.device)
            hashing = hasher.submit(shelf.share, pin, self._source, seconds_left())
            base = job.request.fields.get("base")
            deltas = shelf.deltas(pin, base, self._source, self._slow, seconds_left())
            if deltas is not None and deltas_bytes(deltas) >= self._source.bytes:
                deltas = None
            announce(deltas, channel, seconds_left)
            if deltas is None:
                sent = self._send_full(pin, shards, channel, buffers, seconds_left)
            else:
                sent = self._send_deltas(pin, deltas, channel, seconds_left)
            share = hashing.result()
            # Only a version that was whole to the very end is acknowledged.
            shelf.moved(pin)
            fields = {"status": "sent", "share": share, "bytes": sent}
            shelf.count("transfers")
            shelf.count("bytes", sent)
        except SnapshotEvictedError as error:
            fields = {"status": "gone", "detail": str(error)}
            raise
        except (DeadlineError, WeightSyncError) as error:
            fields = {"status": "failed", "detail": str(error)}
            raise
        finally:
            shelf.release(pin)
            shelf.answer(job.request, fields)

    def _send_full(
        self, pin: Pin, shards: Shards, channel: Channel, buffers: Buffers, seconds_left: Callable[[], float]
    ) -> int:
        """Returns the bytes that were sent."""
        begun, shelf, source = time.monotonic(), self._shelf, self._source
        send_buckets(
            source,
            shards,
            channel,
            buffers,
            seconds_left,
            lambda: shelf.moved(pin),
            lambda index: shelf.ready(pin, index, seconds_left()),
        )
        self._slow = time.monotonic() - begun > LATENCY_S + source.bytes / FAST_BYTES_S
        return source.bytes

    def _send_deltas(
        self, pin: Pin, deltas: Deltas, channel: Channel, seconds_left: Callable[[], float]
    ) -> int:
        """Returns the bytes that were sent."""
        send_deltas(deltas, channel, seconds_left, lambda: self._shelf.moved(pin))
        self._shelf.count("delta_bytes", deltas_bytes(deltas))
        self._shelf.count("delta_instead_of", self._source.bytes)
        return deltas_bytes(deltas)

    def _end(self, failure: str) -> None:
        with self._lock:
            self._ended = True
        if self.pin is not None:
            self._shelf.release(self.pin)
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                self._shelf.release(job.pin)
                self._shelf.answer(job.request, {"status": "failed", "detail": failure})
