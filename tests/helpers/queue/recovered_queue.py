"""A run's queue without sockets, and what it leaves when its broker dies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from memory_journal import MemoryJournal
from raw_request import session_request

from asyncrl.errors import RefusedError, WireError
from asyncrl.queue.broker.handlers import handle, refusal
from asyncrl.queue.broker.queue_state import QueueState
from asyncrl.queue.broker.recovery import Recovery
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.queue.storage.store import Frames, PayloadKey, PayloadStore

TRAIN = StreamSettings(
    groups_per_version=2, max_staleness=1, window=1, depth=8, max_bytes=1 << 20, lease_s=30.0
)


class DurableStore(PayloadStore):
    """In memory, and there again for the next broker: what was flushed lies in `kept`."""

    def __init__(self, kept: dict[PayloadKey, tuple[Frames, int]]) -> None:
        super().__init__(Shelf(kept), durable=True)


class Shelf:
    def __init__(self, kept: dict[PayloadKey, tuple[Frames, int]]) -> None:
        self._kept, self._now = kept, dict(kept)
        self.nbytes = 0

    def write(self, key: PayloadKey, frames: Frames, stamp: int) -> None:
        self._now[key] = (frames, stamp)

    def read(self, key: PayloadKey) -> Frames:
        return self._now[key][0]

    def erase(self, key: PayloadKey) -> None:
        self._now.pop(key, None)

    def flush(self) -> None:
        self._kept.clear()
        self._kept.update(self._now)

    def stamps(self) -> Mapping[PayloadKey, int]:
        return {key: stamp for key, (_, stamp) in self._now.items()}

    def close(self) -> None:
        self.flush()


class Queue:
    """A run's queue, and what it leaves when its broker dies."""

    def __init__(self, durable: bool) -> None:
        self.batches: list[bytes] = []
        self.payloads: dict[PayloadKey, tuple[Frames, int]] = {}
        self._durable = durable
        self.now = 0.0
        self.start()

    def start(self, anew: bool = False) -> None:
        store = DurableStore(self.payloads) if self._durable else PayloadStore()
        self.recovery = Recovery("run", MemoryJournal(self.batches), store, now=self.now, anew=anew)

    def die(self) -> None:
        """Without a word, and another begins on a machine with another clock."""
        self.now += 1000.0
        self.start()

    @property
    def state(self) -> QueueState:
        return self.recovery.queue

    def ask(self, op: str, who: str = "w", frames: Frames = (), **args: Any) -> Any:
        """The value of the reply, which is sent, so what it rests on is kept; a refusal as its reason."""
        try:
            reply = handle(self.state, session_request(op, f"{who}/1", args, frames), self.now, late=True)
        except (RefusedError, WireError) as error:
            reply = refusal(self.state, error)
        self.recovery.flush()
        assert reply is not None
        return reply.error[1] if reply.error else reply.value

    def open(self, snapshot: bytes | None = None, call: int = 1) -> Any:
        opened = self.ask(
            "open", "learner", stream="train", settings=asdict(TRAIN), snapshot=snapshot, call=call
        )
        self.epoch = opened["learner_epoch"]
        return opened

    def submit(self, first: int, count: int) -> None:
        tasks = [[ordinal, b"task %d" % ordinal] for ordinal in range(first, first + count)]
        assert self.ask("submit", stream="train", tasks=tasks, min_version=0) is None

    def lease(self, most: int = 1, held: int = 0, lineage: int = 0) -> list[list[Any]]:
        return self.ask("lease", stream="train", held=held, lineage=lineage, most=most)

    def commit(self, ordinal: int, epoch: int, version: int = 0) -> Any:
        frames = (b"group %d" % ordinal,)
        numbers = {"ordinal": ordinal, "epoch": epoch, "tokens": 1, "start_version": version}
        return self.ask(
            "commit", frames=frames, stream="train", digest=ordinal, nbytes=len(frames[0]), **numbers
        )

    def make(self, count: int) -> list[int]:
        """So many of the next groups, leased and committed."""
        leases = self.lease(count, self.version, self.lineage)
        for ordinal, epoch, *_ in leases:
            assert self.commit(ordinal, epoch, self.version) is None
        return [ordinal for ordinal, *_ in leases]

    def claim(self, step: int, index: int = 0, attempt: int | None = None) -> Any:
        where = {"learner_epoch": self.epoch, "step": step, "index": index, "rank": 0, "attempt": attempt}
        return self.ask("claim", "learner", stream="train", max_tokens=100, whole=False, **where)

    def frames(self, step: int) -> list[bytes]:
        """Of claim 0."""
        args = {
            "learner_epoch": self.epoch,
            "step": step,
            "index": 0,
            "rank": 0,
            "max_tokens": 100,
            "whole": False,
        }
        reply = handle(self.state, session_request("claim", "l/1", {"stream": "train", **args}), self.now)
        assert reply is not None
        return [bytes(frame) for frame in reply.frames]

    def trained(self, step: int) -> Any:
        return self.ask("trained", "learner", stream="train", learner_epoch=self.epoch, step=step)

    def snapshot(self) -> bytes:
        return self.ask("snapshot", "learner", stream="train", learner_epoch=self.epoch)

    @property
    def version(self) -> int:
        return self.state.streams["train"].ledger.state.steps.version

    @property
    def lineage(self) -> int:
        return self.state.streams["train"].ledger.state.lineage

    def states(self) -> dict[int, str]:
        items = self.state.streams["train"].ledger.state.tasks.records
        return {ordinal: item.state.value for ordinal, item in sorted(items.items())}
