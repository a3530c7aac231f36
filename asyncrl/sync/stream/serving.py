"""Handing a version on: the requests that a publisher and a relay answer alike.

      control thread ◂── attach ▸ pin v ▸ send v ──  one session for each who pulls     never blocks
      sender threads ─── buckets ──▸ one of them each                                    waits for that one alone

A `VersionSource` supplies the bytes: a learner's snapshot, or the part that a generator has staged. Its owner answers
all other requests.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from asyncrl.config.schema import SyncConfig
from asyncrl.errors import RefusedError
from asyncrl.rpc.keys import ClientKeys
from asyncrl.rpc.message import Fields
from asyncrl.rpc.server import RpcRequest, RpcServer
from asyncrl.sync.channels.channels import EndPlace, Kind, choose, open_channel, place_of
from asyncrl.sync.channels.torch_transport import SOURCE, host_store
from asyncrl.sync.channels.transport import Channel
from asyncrl.sync.delta.delta_stream import Deltas
from asyncrl.sync.plan.plan import SourcePlan
from asyncrl.sync.stream.sender import Sender
from asyncrl.sync.stream.snapshot import Pin
from asyncrl.sync.tensors.bucket import Shards
from asyncrl.sync.tensors.checksum import ChecksumShare
from asyncrl.types import Version

CLOSE_S = 1.0
"""How long `close` waits for senders stuck on their generators; their threads die with the process."""

MAX_SESSIONS = 1024
"""Each has a thread and a channel of its own."""

COUNTED = ("transfers", "bytes", "failures", "taken_back", "delta_bytes")
"""What senders count."""

Handler = Callable[[RpcRequest], Fields | None]


class VersionSource(Protocol):
    """What can be handed on. Thread-safe."""

    @property
    def device(self) -> torch.device: ...

    def source(self, wire: Any) -> SourcePlan:
        """The plan that somebody asks for; raises WireError or RefusedError for what cannot be sent from here."""

    def pin(self, version: Version, who: str) -> Pin | None:
        """Hold a version; None: it is gone. Raises LookupError while it is still to come."""

    def moved(self, pin: Pin) -> None:
        """A bucket has left. Raises TakenBackError when the memory was wanted back meanwhile."""

    def release(self, pin: Pin) -> None: ...

    def shards(self, pin: Pin) -> Shards: ...

    def ready(self, pin: Pin, bucket: int, seconds: float) -> None:
        """Wait until that bucket of the plan may be read. Raises TakenBackError, DeadlineError."""

    def share(self, pin: Pin, source: SourcePlan, seconds: float) -> ChecksumShare | None:
        """Hash of what `source` sends of the pinned version. Raises TakenBackError, DeadlineError."""

    def deltas(
        self, pin: Pin, base: Version | None, source: SourcePlan, slow: bool, seconds: float
    ) -> Deltas | None:
        """What makes `base`, which the other end has, into the pinned version; None: send all of it. `slow`: the
        link is."""


class VersionServer:
    """Serves `holdings` until `close`.

    `handlers`, the owner's requests by kind, and `on_wake` run in the control thread.
    """

    def __init__(
        self,
        name: str,
        holdings: VersionSource,
        config: SyncConfig,
        *,
        lineage: int,
        host: str,
        handlers: Mapping[str, Handler] | None = None,
        keys: ClientKeys | None = None,
        on_wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.lineage = name, lineage
        self._holdings, self._config, self._host = holdings, config, host
        self._senders: dict[int, Sender] = {}  # by session
        self._retired: list[Sender] = []
        self._sessions = 0
        self._counts: dict[str, float] = defaultdict(float)
        self._count_lock = threading.Lock()
        self._store: dist.TCPStore | None = None
        self._handlers: dict[str, Handler] = {
            "attach": self._attach,
            "pin": self._pin,
            "send": self._send,
            "unpin": self._unpin,
            "bye": self._bye,
            **(handlers or {}),
        }
        self.server = RpcServer(host, name, self._handle, keys, on_wake)
        self.endpoint = self.server.endpoint

    def stats(self) -> dict[str, float]:
        """Since the start: transfers, bytes, failures, taken_back, malformed, refused (at the handshake), delta_bytes
        and their ratio to what they stood for. Now: subscribers attached."""
        with self._count_lock:
            counts = {name: self._counts[name] for name in COUNTED}
            ratio = self._counts["delta_bytes"] / max(1.0, self._counts["delta_instead_of"])
        attached = sum(not sender.ended for sender in list(self._senders.values()))
        return {
            **counts,
            "malformed": self.server.malformed,
            "refused": self.server.refused,
            "subscribers": attached,
            "delta_bytes_ratio": ratio,
        }

    def drop(self, who: str) -> None:
        """End the session of one who is gone. In the control thread."""
        for session, sender in list(self._senders.items()):
            if sender.who == who:
                self._end(session)

    def close(self) -> None:
        self.server.close()
        for session in list(self._senders):
            self._end(session)
        deadline = time.monotonic() + CLOSE_S
        for sender in self._retired:
            sender.join(deadline - time.monotonic())

    # What senders need (`sender.Shelf`).

    def shards(self, pin: Pin) -> Shards:
        return self._holdings.shards(pin)

    def ready(self, pin: Pin, bucket: int, seconds: float) -> None:
        self._holdings.ready(pin, bucket, seconds)

    def share(self, pin: Pin, source: SourcePlan, seconds: float) -> ChecksumShare | None:
        return self._holdings.share(pin, source, seconds)

    def deltas(
        self, pin: Pin, base: Version | None, source: SourcePlan, slow: bool, seconds: float
    ) -> Deltas | None:
        return self._holdings.deltas(pin, base, source, slow, seconds)

    def moved(self, pin: Pin) -> None:
        self._holdings.moved(pin)

    def release(self, pin: Pin) -> None:
        self._holdings.release(pin)

    def answer(self, request: RpcRequest, fields: Fields) -> None:
        self.server.reply(request, fields)

    def count(self, event: str, amount: float = 1) -> None:
        with self._count_lock:
            self._counts[event] += amount

    # Requests, in the control thread.

    def _handle(self, request: RpcRequest) -> Fields | None:
        if request.kind not in self._handlers:
            raise RefusedError("unknown", f"{self.name} knows no request {request.kind!r}")
        lineage = request.fields["lineage"]
        if lineage != self.lineage and not (lineage is None and request.kind == "hello"):
            who = request.fields.get("who", "a subscriber")
            raise RefusedError(
                "lineage", f"{who} follows lineage {lineage}, {self.name} publishes lineage {self.lineage}"
            )
        return self._handlers[request.kind](request)

    def _attach(self, request: RpcRequest) -> Fields:
        """A new session with a channel of its own; an earlier one of the same subscriber ends."""
        who = str(request.fields["who"])
        source = self._holdings.source(request.fields["plan"])
        here = place_of(self._holdings.device)
        kind = choose(self._config.backend, here, EndPlace.from_wire(request.fields["place"]))
        for session, sender in list(self._senders.items()):
            if sender.who == who or sender.ended:
                self._end(session)
        if len(self._senders) >= MAX_SESSIONS:
            raise RefusedError("full", f"{self.name} serves {MAX_SESSIONS} subscribers already")
        if self._store is None:
            self._store = host_store(self._host, self._config.deadline_s)
        self._sessions += 1
        name = f"{who}/{self._sessions}"
        self._senders[self._sessions] = Sender(
            who, source, self, lambda: self._open_channel(kind, name, who), self._config.deadline_s
        )
        return {
            "session": self._sessions,
            "channel": name,
            "host": self._host,
            "port": self._store.port,
            "backend": kind,
        }

    def _pin(self, request: RpcRequest) -> Fields | None:
        self._release_of(self._sender(request))
        version = int(request.fields["version"])

        def look() -> Fields | None:
            sender = self._sender(request)  # it may have ended meanwhile
            try:
                sender.pin = self._holdings.pin(version, sender.who)
            except LookupError:
                return None  # this one is a little behind the one that named the version
            return {"pinned": sender.pin is not None}

        if (found := look()) is not None:
            return found
        self.server.park(request, look, float(request.fields["wait_s"]), {"pinned": False, "late": True})
        return None

    def _send(self, request: RpcRequest) -> None:
        sender = self._sender(request)
        if sender.pin is None or sender.pin.version != request.fields["version"]:
            raise RefusedError("unpinned", f"{sender.who} did not pin version {request.fields['version']}")
        if not sender.submit(request, sender.pin):
            raise RefusedError("session", f"{sender.who} must attach to {self.name} again")

    def _unpin(self, request: RpcRequest) -> Fields:
        self._release_of(self._sender(request))
        return {}

    def _bye(self, request: RpcRequest) -> Fields:
        self._end(int(request.fields["session"]))
        return {}

    def _sender(self, request: RpcRequest) -> Sender:
        sender = self._senders.get(request.fields["session"])
        if sender is None or sender.ended:
            raise RefusedError("session", f"{request.fields.get('who')} must attach to {self.name} again")
        return sender

    def _release_of(self, sender: Sender) -> None:
        if sender.pin is not None:
            self._holdings.release(sender.pin)
            sender.pin = None

    def _end(self, session: int) -> None:
        sender = self._senders.pop(session, None)
        if sender is not None:
            self._release_of(sender)
            sender.close()
            self._retired = [old for old in self._retired if not old.join(0)] + [sender]

    def _open_channel(self, kind: Kind, name: str, who: str) -> Channel:
        assert self._store is not None
        return open_channel(
            kind,
            self._store,
            name,
            SOURCE,
            who=self.name,
            whom=who,
            own_host=self._host,
            device=self._holdings.device,
            deadline_s=self._config.deadline_s,
        )
