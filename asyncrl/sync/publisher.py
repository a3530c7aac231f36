"""The learner's end of the weight stream: one publisher per rank serves its shards to every generator.

      trainer ── publish(v) ──▸ snapshot (the only pause) ──▸ wakes parked requests
                                      │ pinned by
      control thread ◂── newest? pin v, send v ──  generators      never blocks
      sender threads ── buckets ──▸ one generator each             wait for that generator alone

Generators pull. Rank 0 is asked for the newest version; each rank that the generator's plan needs pins it,
sends its part and acknowledges with a hash of what it sent. Nobody gathers the model, and the trainer waits
for no generator.
"""

from __future__ import annotations

import atexit
import hashlib
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.config.schema import SyncConfig
from asyncrl.errors import RefusedError
from asyncrl.sync.arena import Arena
from asyncrl.sync.bucket import Shards
from asyncrl.sync.control import ControlServer, Fields, Request
from asyncrl.sync.digest import digest_source
from asyncrl.sync.layout import Layout, to_wire
from asyncrl.sync.plan import SourcePlan, source_from_wire
from asyncrl.sync.sender import Sender
from asyncrl.sync.snapshot import Pin, Snapshots
from asyncrl.sync.torch_transport import SOURCE, host_store, make_channel
from asyncrl.sync.transport import Channel
from asyncrl.types import Version

CLOSE_S = 1.0
"""How long `close` waits for senders stuck on their generators; their threads die with the process."""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """pause_s: how long the learner stood still · bytes copied · floor_s: one plain copy of as many bytes."""

    pause_s: float
    bytes: int
    floor_s: float


class Publisher:
    """Serves `tensors`, this rank's live shards as `layout` says, to any number of subscribers.

    `lineage` is the learner's: a subscriber of another one is refused by name. Raises WeightSyncError when
    tensors and layout do not match.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        layout: Layout,
        tensors: Mapping[str, torch.Tensor],
        config: SyncConfig,
        lineage: int,
    ) -> None:
        self.rank, self.world, self.lineage = rank, world, lineage
        self.name = f"learner rank {rank}"
        self._config = config
        self._live = Shards(layout, tensors)
        self._arenas = (Arena(self._live), Arena(self._live))
        self._floor_s = min(self._arenas[0].floor(self._arenas[1]) for _ in range(2))
        self._snapshots = Snapshots()
        self._digests: dict[tuple[Version, bytes], int] = {}
        self._digest_lock = threading.Lock()
        self._senders: dict[int, Sender] = {}  # by session
        self._retired: list[Sender] = []
        self._sessions = 0
        self._counts: dict[str, float] = defaultdict(float)
        self._count_lock = threading.Lock()
        self._store = host_store(config.host, config.deadline_s)
        self._server = ControlServer(config.host, self.name, self._handle)
        self.endpoint = self._server.endpoint
        # A thread that is inside torch while the interpreter is taken down aborts the process.
        atexit.register(self.close)

    def publish(self, version: Version) -> PublishReport:
        """Copy the live shards and return; generators take the copy from then on. Versions must rise."""
        slot = self._snapshots.begin(version)
        pause_s = self._arenas[slot].take(self._live)
        self._snapshots.commit(slot)
        self._server.wake()
        return PublishReport(pause_s, self._arenas[slot].bytes, self._floor_s)

    def stats(self) -> dict[str, float]:
        """Since the start: transfers, bytes, failures, taken_back, malformed. Now: subscribers attached."""
        with self._count_lock:
            counts = {name: self._counts[name] for name in ("transfers", "bytes", "failures", "taken_back")}
        attached = sum(not sender.ended for sender in list(self._senders.values()))
        return {**counts, "malformed": self._server.malformed, "subscribers": attached}

    def close(self, wait_s: float = 0.0) -> None:
        """Let transfers in flight end, at most `wait_s`, then stop answering. May be called again."""
        atexit.unregister(self.close)
        self._snapshots.wait_idle(wait_s)
        self._server.close()
        for session in list(self._senders):
            self._drop(session)
        deadline = time.monotonic() + CLOSE_S
        for sender in self._retired:
            sender.join(deadline - time.monotonic())

    # What senders need (`sender.Shelf`).

    def shards(self, pin: Pin) -> Shards:
        return self._arenas[pin.slot].shards

    def digest(self, pin: Pin, source: SourcePlan) -> int | None:
        """Hash of what `source` sends of the pinned version; once for all generators of the same plan."""
        if not self._config.verify:
            return None
        key = (pin.version, hashlib.blake2b(repr(source).encode(), digest_size=16).digest())
        with self._digest_lock:
            if key not in self._digests:
                self._digests = {k: d for k, d in self._digests.items() if k[0] >= pin.version - 1}
                self._digests[key] = digest_source(source, self.shards(pin))
            return self._digests[key]

    def moved(self, pin: Pin) -> None:
        self._snapshots.moved(pin)

    def release(self, pin: Pin) -> None:
        self._snapshots.release(pin)

    def answer(self, request: Request, fields: Fields) -> None:
        self._server.answer(request, fields)

    def count(self, event: str, amount: float = 1) -> None:
        with self._count_lock:
            self._counts[event] += amount

    # Requests, in the control thread.

    def _handle(self, request: Request) -> Fields | None:
        handlers = {
            "hello": self._hello,
            "attach": self._attach,
            "newest": self._newest,
            "pin": self._pin,
            "send": self._send,
            "unpin": self._unpin,
            "bye": self._bye,
        }
        if request.kind not in handlers:
            raise RefusedError("unknown", f"{self.name} knows no request {request.kind!r}")
        lineage = request.fields["lineage"]
        if lineage != self.lineage and not (lineage is None and request.kind == "hello"):
            who = request.fields.get("who", "a subscriber")
            raise RefusedError(
                "lineage", f"{who} follows lineage {lineage}, {self.name} publishes lineage {self.lineage}"
            )
        return handlers[request.kind](request)

    def _hello(self, request: Request) -> Fields:
        return {
            "rank": self.rank,
            "world": self.world,
            "lineage": self.lineage,
            "layout": to_wire(self._live.layout),
        }

    def _attach(self, request: Request) -> Fields:
        """A new session with a channel of its own; an earlier one of the same subscriber ends."""
        who = str(request.fields["who"])
        source = source_from_wire(request.fields["plan"], self.rank, self._live.layout)
        for session, sender in list(self._senders.items()):
            if sender.who == who or sender.ended:
                self._drop(session)
        self._sessions += 1
        name = f"{who}/{self._sessions}"
        self._senders[self._sessions] = Sender(
            who, source, self, lambda: self._open_channel(name, who), self._config.deadline_s
        )
        return {
            "session": self._sessions,
            "channel": name,
            "host": self._config.host,
            "port": self._store.port,
            "backend": self._config.backend,
        }

    def _newest(self, request: Request) -> Fields | None:
        newer_than = int(request.fields["newer_than"])

        def look() -> Fields | None:
            newest = self._snapshots.newest
            return {"version": newest} if newest is not None and newest > newer_than else None

        if (found := look()) is not None:
            return found
        self._server.park(request, look, float(request.fields["wait_s"]), {"version": None})
        return None

    def _pin(self, request: Request) -> Fields | None:
        sender = self._sender(request)
        version = int(request.fields["version"])
        self._release_of(sender)

        def look() -> Fields | None:
            try:
                sender.pin = self._snapshots.pin(version, sender.who)
            except LookupError:
                return None  # this rank is a little behind the one that named the version
            return {"pinned": sender.pin is not None}

        if (found := look()) is not None:
            return found
        self._server.park(request, look, float(request.fields["wait_s"]), {"pinned": False})
        return None

    def _send(self, request: Request) -> None:
        sender = self._sender(request)
        if sender.pin is None or sender.pin.version != request.fields["version"]:
            raise RefusedError("unpinned", f"{sender.who} did not pin version {request.fields['version']}")
        if not sender.submit(request, sender.pin):
            raise RefusedError("session", f"{sender.who} must attach to {self.name} again")

    def _unpin(self, request: Request) -> Fields:
        self._release_of(self._sender(request))
        return {}

    def _bye(self, request: Request) -> Fields:
        self._drop(int(request.fields["session"]))
        return {}

    def _sender(self, request: Request) -> Sender:
        sender = self._senders.get(request.fields["session"])
        if sender is None or sender.ended:
            raise RefusedError("session", f"{request.fields.get('who')} must attach to {self.name} again")
        return sender

    def _release_of(self, sender: Sender) -> None:
        if sender.pin is not None:
            self._snapshots.release(sender.pin)
            sender.pin = None

    def _drop(self, session: int) -> None:
        sender = self._senders.pop(session, None)
        if sender is not None:
            self._release_of(sender)
            sender.close()
            self._retired = [old for old in self._retired if not old.join(0)] + [sender]

    def _open_channel(self, name: str, who: str) -> Channel:
        config: Any = self._config
        return make_channel(
            config.backend,
            self._store,
            name,
            SOURCE,
            who=self.name,
            whom=who,
            own_host=config.host,
            device=self._live.device,
            deadline_s=config.deadline_s,
        )
