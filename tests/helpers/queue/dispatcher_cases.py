"""A desk and sessions joined by a network that a test controls: no sockets, and time only moves when it is told to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raw_request import envelope, request_of

from asyncrl.queue.broker.dispatcher import Dispatcher, OutgoingReply
from asyncrl.queue.broker.queue_state import QueueState
from asyncrl.queue.client.session import ReplyValue, Session, Undo
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.queue.wire.envelope import pack_replies, pack_reply, unpack_replies

FOREVER = 1e6
B = 4
TRAIN = StreamSettings(
    groups_per_version=B, max_staleness=1, window=1, depth=2 * B, max_bytes=1 << 30, lease_s=30.0
)


def reply_of(letters: Sequence[OutgoingReply]) -> dict[str, Any]:
    """Of the only one."""
    (letter,) = letters
    ((number, value, error, _),) = unpack_replies(letter.frames)
    return {"id": number, "value": value, "error": error}


def reply(number: Any, value: Any = None, error: Any = None, payload: Sequence[bytes] = ()) -> list[Any]:
    """A message of this reply alone."""
    (message,) = pack_replies([pack_reply(number, value, error, payload)])
    return message


def opened_desk(tasks: int = 0, lease_s: float = FOREVER) -> Dispatcher:
    """A desk whose stream 'train' is open and has so many tasks."""
    desk, train = Dispatcher(QueueState("run")), replace(TRAIN, lease_s=lease_s)
    desk.receive(b"setup", [envelope("open", stream="train", settings=asdict(train))], 0.0)
    if tasks:
        submit(desk, 0, tasks)
    return desk


def submit(desk: Dispatcher, first: int, count: int, now: float = 0.0) -> None:
    packed = [[ordinal, b"\x90"] for ordinal in range(first, first + count)]
    call = envelope("submit", 2 + first, stream="train", tasks=packed, min_version=0)
    assert reply_of(desk.receive(b"setup", [call], now))["error"] is None


def lease_args(**changes: object) -> dict[str, Any]:
    return {"stream": "train", "held": 0, "lineage": 0, "most": 1, **changes}


@dataclass
class Network:
    """Messages under way, as (to, frames); `deliver` loses none and keeps their order."""

    desk: Dispatcher
    now: float = 0.0
    sessions: dict[bytes, Session] = field(default_factory=dict)
    results: dict[tuple[bytes, int], ReplyValue | Exception] = field(default_factory=dict)
    to_desk: list[tuple[bytes, list[Any]]] = field(default_factory=list)
    to_clients: list[tuple[bytes, list[Any]]] = field(default_factory=list)

    def session(self, who: str) -> Session:
        return self.sessions.setdefault(who.encode(), Session("run", f"{who}/1", "here"))

    def ask(
        self,
        who: str,
        op: str,
        args: Mapping[str, Any],
        wait_s: float = 0.0,
        undo: Undo | None = None,
        frames: Sequence[bytes] = (),
        deadline_s: float = FOREVER,
    ) -> tuple[bytes, int]:
        request = request_of(op, args, wait_s, frames)
        request_id = self.session(who).request(request, frames, deadline_s, self.now, undo)
        return who.encode(), request_id

    def deliver(self, seconds: float = 0.0) -> None:
        """Everything that is under way, and what follows from it, after so much time."""
        self.now += seconds
        for identity, session in self.sessions.items():
            self.settle(identity, session.tick(self.now))
        self.tick()
        while self.to_desk or self.to_clients:
            while self.to_desk:
                self.arrive(*self.to_desk.pop(0))
            self.tick()

    def arrive(self, identity: bytes, frames: Sequence[Any]) -> None:
        """One message reaches the desk."""
        self._post(self.desk.receive(identity, [bytes(frame) for frame in frames], self.now))

    def tick(self) -> None:
        """The desk's replies go out and reach their clients, and what these have to say is under way."""
        self._post(self.desk.tick(self.now))
        while self.to_clients:
            self.reach(*self.to_clients.pop(0))
        self.collect()

    def reach(self, identity: bytes, frames: Sequence[Any]) -> None:
        """One message reaches its client."""
        if identity in self.sessions:
            self.settle(identity, self.sessions[identity].receive(frames, self.now))

    def collect(self) -> None:
        for identity, session in self.sessions.items():
            self.to_desk += [(identity, message) for message in session.outgoing()]

    def settle(self, identity: bytes, outcomes: Sequence[Any]) -> None:
        for outcome in outcomes:
            self.results[identity, outcome.number] = outcome.result

    def value(self, key: tuple[bytes, int]) -> Any:
        result = self.results[key]
        assert isinstance(result, ReplyValue), result
        return result.value

    def _post(self, letters: Sequence[Any]) -> None:
        self.to_clients += [(letter.identity, letter.frames) for letter in letters]


def counting(desk: Dispatcher) -> list[str]:
    """The verbs that are handled from now on, repeated attempts included."""
    handled: list[str] = []
    handle = desk._handle

    def counted(queue: Any, incoming: Any, now: float, late: bool) -> Any:
        handled.append(incoming.request.verb)
        return handle(queue, incoming, now, late)

    desk._handle = counted
    return handled
