"""Sends versions to subscribers: the requests that a publisher and a relay answer alike.

      RPC thread      ◂── attach ▸ pin v ▸ send v ──  one session for each subscriber    never blocks
      sender threads  ─── buckets ──▸ one of them each                                   waits for that one alone

A `VersionSource` supplies the bytes: the snapshot of a learner, or the part that a generator has staged. Its owner
answers all other requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from asyncrl.config.schema import SyncConfig
from asyncrl.errors import RefusedError, WireError
from asyncrl.rpc.keys import ClientKeys
from asyncrl.rpc.message import Fields
from asyncrl.rpc.server import RpcRequest, RpcServer
from asyncrl.sync.channels.channel import SOURCE, Meeting
from asyncrl.sync.channels.choose import EndPlace, choose, listen, place_of
from asyncrl.sync.stream.sender import Sender, TransferCounts, VersionSource

CLOSE_S = 1.0
"""How long `close` waits for senders stuck on their subscribers; their threads die with the process."""

MAX_SESSIONS = 1024
"""Each has a thread and a channel of its own."""

LONGEST_NAME = 256

log = logging.getLogger(__name__)

Handler = Callable[[RpcRequest], Fields | None]


class VersionServer:
    """Serves the versions of `source` until `close`.

    Args:
        name: of this publisher or relay, for errors
        host: address of this machine at which subscribers reach it
        handlers: the owner's requests by kind, in the RPC thread
        keys: that subscribers must hold too
        on_wake: called after each `server.wake`, in the RPC thread
        on_request: called with the subscriber's name at each request of a session, in the RPC thread
    """

    def __init__(
        self,
        name: str,
        source: VersionSource,
        config: SyncConfig,
        *,
        lineage: int,
        host: str,
        keys: ClientKeys | None,
        handlers: Mapping[str, Handler],
        on_wake: Callable[[], None] = lambda: None,
        on_request: Callable[[str], object] = lambda who: None,
    ) -> None:
        self.name, self.lineage = name, lineage
        self._source, self._config, self._host = source, config, host
        self._senders: dict[int, Sender] = {}  # by session
        self._retired: list[Sender] = []
        self._sessions = 0
        self.counts = TransferCounts()
        self._handlers: dict[str, Handler] = {
            "attach": self._attach,
            "pin": self._pin,
            "send": self._send,
            "unpin": self._unpin,
            "alive": self._alive,
            "bye": self._bye,
            **handlers,
        }
        self._on_wake, self._on_request = on_wake, on_request
        self.server = RpcServer(host, name, self._handle, keys, self._wake, config.port_range)
        self.endpoint = self.server.endpoint

    def add_handler(self, kind: str, handler: Handler) -> None:
        """Let the owner answer a further kind of request."""
        self._handlers[kind] = handler

    def stats(self) -> dict[str, float]:
        """Since the start: transfers, bytes, failures, taken_back, malformed, refused (at the handshake), delta_bytes
        and their ratio to the full streams that they replaced. Now: subscribers attached."""
        return {
            **self.counts.stats(),
            "malformed": self.server.malformed,
            "refused": self.server.refused,
            "subscribers": sum(not sender.ended for sender in list(self._senders.values())),
        }

    def drop(self, who: str) -> None:
        """End the session of a subscriber that is gone. In the RPC thread."""
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

    def _wake(self) -> None:
        """End the sessions of subscribers that are gone, or silent for sync.silence_s. In the RPC thread."""
        silent_since = time.monotonic() - self._config.silence_s
        for session, sender in list(self._senders.items()):
            if sender.seen_at < silent_since and not sender.ended:
                log.warning(
                    "%s: %s is silent for more than %.0f s", self.name, sender.who, self._config.silence_s
                )
            if sender.seen_at < silent_since or sender.ended:
                self._end(session)
        self._on_wake()

    # Requests, in the RPC thread.

    def _handle(self, request: RpcRequest) -> Fields | None:
        who = request.fields.get("who")
        if not isinstance(who, str) or len(who) > LONGEST_NAME:
            raise WireError(f"a subscriber's name is a text of at most {LONGEST_NAME} characters")
        if request.kind not in self._handlers:
            raise RefusedError("unknown", f"{self.name} has no request {request.kind!r}")
        if (lineage := request.fields["lineage"]) != self.lineage:
            raise RefusedError(
                "lineage", f"{who} follows lineage {lineage}, {self.name} publishes lineage {self.lineage}"
            )
        return self._handlers[request.kind](request)

    def _attach(self, request: RpcRequest) -> Fields:
        """A new session with a channel of its own; an earlier one of the same subscriber ends."""
        who = str(request.fields["who"])
        plan = self._source.requested_plan(request.fields["plan"])
        here = place_of(self._source.device)
        kind = choose(self._config.backend, here, EndPlace.from_wire(request.fields["place"]))
        for session, sender in list(self._senders.items()):
            if sender.who == who or sender.ended:
                self._end(session)
        if len(self._senders) >= MAX_SESSIONS:
            raise RefusedError("full", f"{self.name} serves {MAX_SESSIONS} subscribers already")
        listener = listen(kind, self._host, self._config.port_range)
        self._sessions += 1
        name = f"{who}/{self._sessions}"
        device, deadline_s = self._source.device, self._config.deadline_s
        meeting = Meeting(name, SOURCE, self.name, who, device, deadline_s)
        self._senders[self._sessions] = Sender(plan, self._source, kind, listener, meeting, self.counts)
        return {"session": self._sessions, "channel": name, "backend": kind, "listener": listener.offer}

    def _pin(self, request: RpcRequest) -> Fields | None:
        self._release_of(self._sender(request))
        version = int(request.fields["version"])

        asked = replace(request, fields={name: request.fields[name] for name in ("who", "session")})

        def try_pin() -> Fields | None:
            sender = self._sender(asked)  # it may have ended meanwhile
            try:
                sender.pin = self._source.pin(version, sender.who)
            except LookupError:
                return None  # this rank is a little behind the one that named the version
            return {"pinned": sender.pin is not None}

        if (found := try_pin()) is not None:
            return found
        late = {"pinned": False, "late": True}
        self.server.park(request, try_pin, float(request.fields["wait_s"]), late)
        return None

    def _send(self, request: RpcRequest) -> None:
        sender = self._sender(request)
        if sender.pin is None or sender.pin.version != request.fields["version"]:
            raise RefusedError("unpinned", f"{sender.who} did not pin version {request.fields['version']}")
        result = sender.submit(sender.pin, request.fields.get("base"))
        if result is None:
            raise RefusedError("session", f"{sender.who} must attach to {self.name} again")
        asked = replace(request, fields={})
        result.add_done_callback(lambda sent: self.server.reply(asked, sent.result()))

    def _unpin(self, request: RpcRequest) -> Fields:
        self._release_of(self._sender(request))
        return {}

    def _alive(self, request: RpcRequest) -> Fields:
        """A sign of life of a subscriber that needs nothing from here now."""
        self._sender(request)
        return {}

    def _bye(self, request: RpcRequest) -> Fields:
        self._end(int(request.fields["session"]))
        return {}

    def _sender(self, request: RpcRequest) -> Sender:
        sender = self._senders.get(request.fields["session"])
        if sender is None or sender.ended:
            raise RefusedError("session", f"{request.fields.get('who')} must attach to {self.name} again")
        sender.seen_at = time.monotonic()
        self._on_request(sender.who)
        return sender

    def _release_of(self, sender: Sender) -> None:
        if sender.pin is not None:
            self._source.release(sender.pin)
            sender.pin = None

    def _end(self, session: int) -> None:
        sender = self._senders.pop(session, None)
        if sender is not None:
            self._release_of(sender)
            sender.close()
            self._retired = [old for old in self._retired if not old.join(0)] + [sender]
