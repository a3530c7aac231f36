"""Whatever is lost, repeated, late, damaged or forged on the way: who asks gets the answer to what was asked, or none.

The real session and desk, and a service whose answers say which request they are for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from dispatcher_cases import reply, reply_of
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import eventually

from asyncrl.errors import DeadlineError, RefusedError
from asyncrl.queue.broker.dispatcher import Dispatcher
from asyncrl.queue.broker.queue_state import QueueState, Reply, SessionRequest
from asyncrl.queue.client.connection import Connection
from asyncrl.queue.client.link import Listener
from asyncrl.queue.client.session import RESEND_S, Outcome, ReplyValue, Session
from asyncrl.queue.protocol import requests
from asyncrl.queue.protocol.requests import Request
from asyncrl.queue.wire import wire
from asyncrl.queue.wire.envelope import UNKNOWN, WireRequest, unpack_call, unpack_replies

Frames = list[Any]

DEADLINE_S = 40.0


class TokenRequest(Request, frozen=True, kw_only=True):
    token: int


class Echo(TokenRequest, frozen=True, kw_only=True):
    verb = "echo"


class Refuse(TokenRequest, frozen=True, kw_only=True):
    verb = "refuse"


class Park(TokenRequest, frozen=True, kw_only=True):
    verb = "park"


class Grant(TokenRequest, frozen=True, kw_only=True):
    verb = "grant"


class Return(TokenRequest, frozen=True, kw_only=True):
    verb = "give_back"


KINDS: tuple[type[TokenRequest], ...] = (Echo, Refuse, Park, Grant)


@pytest.fixture(autouse=True, scope="module")
def readable_requests() -> Iterator[None]:
    """The broker knows these verbs alone."""
    decoders = {kind.verb: msgspec.msgpack.Decoder(kind) for kind in (*KINDS, Return)}
    with patch.dict(requests.DECODERS, decoders, clear=True):
        yield


@dataclass
class Service:
    """In place of the queue's handlers. held: grants that were not given back · done: tokens of one desk's time."""

    queue: QueueState = field(default_factory=lambda: QueueState("run"))
    held: set[int] = field(default_factory=set)
    done: set[tuple[str, int]] = field(default_factory=set)
    grants: int = 0

    def handle(
        self, queue: QueueState, incoming: SessionRequest, now: float, late: bool = False
    ) -> Reply | None:
        request = incoming.request
        assert isinstance(request, TokenRequest)
        verb, token = request.verb, request.token
        if verb == "park" and not late and token > queue.posts:
            return None
        assert (verb, token) not in self.done, "done a second time"
        self.done.add((verb, token))
        match verb:
            case "echo" | "park":
                return Reply(token, [str(token).encode()])
            case "refuse":
                return Reply(error=("refused", "never", str(token)))
            case "grant":
                self.grants += 1
                self.held.add(self.grants)
                return Reply([token, self.grants])
            case "give_back":
                self.held.discard(token)
                self.done.discard(("give_back", token))  # it may be asked for as often as the grant comes
                return Reply()
        raise AssertionError(f"nobody asked for {verb!r}")


def give_back(granted: Any) -> Request:
    return Return(token=granted[1])


class Seam:
    """One client, one broker after another, and all messages between them, which may arrive in any order."""

    def __init__(self, random: Random) -> None:
        self.random, self.now = random, 0.0
        self.service, self.session = Service(), Session("run", "w/1", "here")
        self.desk = Dispatcher(self.service.queue, self.service.handle)
        self.to_desk: list[Frames] = []
        self.to_client: list[Frames] = []
        self.asked: dict[int, tuple[str, int]] = {}  # those without an outcome: number -> (op, token)
        self.ours: set[int] = set()
        self.told: set[int] = set()  # tokens whose caller has got the grant
        self.heard: dict[int, int] = {}  # grants that have reached the client -> token
        self.all_given_back = True
        self.tokens = 0

    # ------------------------------------------------------------------ what may happen

    def ask(self) -> None:
        self.tokens += 1
        kind = self.random.choice(KINDS)
        request = kind(token=self.tokens, wait_s=10.0 if kind is Park else 0.0)
        undo = give_back if kind is Grant else None
        number = self.session.request(request, (), DEADLINE_S, self.now, undo)
        self.asked[number] = kind.verb, self.tokens
        self.ours.add(number)

    def give_up(self) -> None:
        if self.asked:
            number = self.random.choice(list(self.asked))
            self.session.abandon(number)
            del self.asked[number]

    def wait(self) -> None:
        self.now += self.random.choice((0.1, RESEND_S, DEADLINE_S))
        self.settle(self.session.tick(self.now))
        self.post(self.desk.tick(self.now))

    def reach_desk(self) -> None:
        if self.to_desk:
            self.post(self.desk.receive(b"w", self._pick(self.to_desk), self.now))

    def reach_client(self) -> None:
        if self.to_client:
            self._hear(self._pick(self.to_client))

    def lose(self) -> None:
        for messages in (self.to_desk, self.to_client):
            del messages[self.random.randrange(len(messages) + 1) :]

    def damage(self) -> None:
        """A message that the desk cannot read and complains of, in place of a copy or of the only one."""
        if self.to_desk:
            damaged = self._pick(self.to_desk)[0][:-1]
            self.post(self.desk.receive(b"w", [damaged], self.now))

    def reconnect(self) -> None:
        self.session.reconnected(self.now)

    def restart(self) -> None:
        self.desk = Dispatcher(self.service.queue, self.service.handle)
        self.service.done = set()
        self.reconnect()

    def be_forgotten(self) -> None:
        self.desk._forget(b"w")
        self.service.done = set()

    def be_busy(self) -> None:
        """As if it had not read for long."""
        for caller in self.desk._clients.values():
            caller.unread_bytes += 1 << 40

    def be_free(self) -> None:
        for caller in self.desk._clients.values():
            caller.unread_bytes %= 1 << 40

    def move(self) -> None:
        self.service.queue.posts += 3
        self.post(self.desk.tick(self.now))

    # ------------------------------------------------------------------ what must be true

    def settle(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.number not in self.ours:
                # Of what the session gives back by itself; what is lost on the way ends by its lease.
                self.all_given_back &= not isinstance(outcome.result, DeadlineError)
                continue
            op, token = self.asked.pop(outcome.number)  # once, and not after it was given up
            match outcome.result:
                case ReplyValue([first, _]) if op == "grant":
                    assert first == token
                    self.told.add(token)
                case ReplyValue(value, frames) if op in ("echo", "park"):
                    assert (value, [bytes(frame) for frame in frames]) == (token, [str(token).encode()])
                case RefusedError(reason="never", detail=detail) if op == "refuse":
                    assert detail == str(token)
                case DeadlineError():
                    pass
                case other:
                    raise AssertionError(f"{op} {token} ended with {other!r}")

    def end(self) -> None:
        """Once nothing is lost any more all have their answers, and no grant that has come is left behind."""
        self.be_free()
        while self.to_client:
            self.reach_client()
        for _ in range(3):
            self.session.reconnected(self.now)
            self.service.queue.posts = self.tokens
            for _ in range(9):
                self._exchange_all()
            self.now += 11.0
            self.settle(self.session.tick(self.now))
        assert not self.asked
        assert self.session.next_time() is None
        assert not self.desk.parked
        # Nor does the session know of a second grant, by another broker, for a caller that has got one.
        left = {self.heard[granted] for granted in self.service.held & self.heard.keys()} - self.told
        assert not (left and self.all_given_back)
        assert not self.service.queue.refused["bug"]

    # ------------------------------------------------------------------ the wire

    def post(self, letters: list[Any]) -> None:
        self.to_client += [[bytes(frame) for frame in letter.frames] for letter in letters]

    def collect(self) -> None:
        self.to_desk += [[bytes(frame) for frame in message] for message in self.session.outgoing()]

    def _pick(self, messages: list[Frames]) -> Frames:
        """Mostly the oldest; a copy of it may stay."""
        at = self.random.randrange(len(messages)) if self.random.random() < 0.3 else 0
        return messages[at] if self.random.random() < 0.2 else messages.pop(at)

    def _hear(self, frames: Frames) -> None:
        for _, value, _, _ in unpack_replies(frames):
            if isinstance(value, list):
                self.heard[value[1]] = value[0]
        self.settle(self.session.receive(frames, self.now))
        self.collect()

    def _exchange_all(self) -> None:
        self.collect()
        while self.to_desk:
            self.post(self.desk.receive(b"w", self.to_desk.pop(0), self.now))
        self.post(self.desk.tick(self.now))
        while self.to_client:
            self._hear(self.to_client.pop(0))


STEPS = {
    Seam.ask: 6,
    Seam.give_up: 2,
    Seam.wait: 2,
    Seam.reach_desk: 8,
    Seam.reach_client: 6,
    Seam.lose: 1,
    Seam.damage: 1,
    Seam.reconnect: 1,
    Seam.restart: 1,
    Seam.be_forgotten: 1,
    Seam.be_busy: 1,
    Seam.be_free: 1,
    Seam.move: 1,
}


def play(random: Random, steps: int) -> None:
    seam = Seam(random)
    for step in random.choices(list(STEPS), list(STEPS.values()), k=steps):
        step(seam)
        seam.collect()
    seam.end()


@given(st.randoms(use_true_random=False), st.integers(1, 60))
@settings(max_examples=300)
def test_who_asks_gets_the_answer_to_what_was_asked(random: Random, steps: int) -> None:
    play(random, steps)


@pytest.mark.parametrize("number", [1, 2])
def test_who_waits_is_not_answered_by_a_complaint_or_a_notice(number: int) -> None:
    """Neither bears a number that a request may have."""
    desk, session = Dispatcher(QueueState("run"), Service().handle), Session("run", "w/1", "here")
    for token in (1, 2):
        session.request(Echo(token=token), (), DEADLINE_S, 0.0)
    session.outgoing()  # lost
    session.abandon(3 - number)
    (notice,) = session.outgoing()
    assert unpack_call(notice).requests == []
    assert desk.receive(b"w", notice, 0.0) == []
    (complaint,) = desk.receive(b"w", [b"noise"], 0.0)
    assert reply_of([complaint])["id"] == UNKNOWN
    assert session.receive(complaint.frames, 0.0) == []
    assert session.request(Echo(token=3), (), DEADLINE_S, 0.0) > UNKNOWN


def asked_to_give_back(session: Session) -> list[int]:
    return [token for message in session.outgoing() for op, token in asked_in(message) if op == "give_back"]


def asked_in(message: Frames) -> list[tuple[str, int]]:
    """(op, token) of the requests in a message."""
    return [(asked.op, wire.unpack_value(asked.args)["token"]) for asked in unpack_call(message).requests]


def test_a_grant_behind_a_refusal_of_the_same_request_is_given_back() -> None:
    """The first copy of a request came while the client was busy, the second after that; then its caller left."""
    session = Session("run", "w/1", "here")
    number = session.request(Grant(token=1), (), DEADLINE_S, 0.0, give_back)
    session.abandon(number)
    session.receive(reply(number, error=["refused", "busy", ""]), 0.0)
    assert asked_to_give_back(session) == []
    session.receive(reply(number, [1, 77]), 0.0)
    assert asked_to_give_back(session) == [77]


def test_both_grants_of_a_request_that_two_brokers_did_are_given_back() -> None:
    session = Session("run", "w/1", "here")
    number = session.request(Grant(token=1), (), DEADLINE_S, 0.0, give_back)
    session.abandon(number)
    for granted in (77, 78):
        session.receive(reply(number, [1, granted]), 0.0)
    assert asked_to_give_back(session) == [77, 78]


def test_the_answer_to_a_request_that_was_given_up_is_no_complaint() -> None:
    session = Session("run", "w/1", "here")
    given_up = session.request(Echo(token=1), (), DEADLINE_S, 0.0)
    session.request(Echo(token=2), (), DEADLINE_S, 0.0)
    session.abandon(given_up)
    session.receive(reply(given_up, error=["wire", "", "token is no number"]), 0.0)
    (late,) = session.tick(DEADLINE_S)
    assert "token is no number" not in str(late.result)


class Wire:
    """A link whose messages are seen by the test."""

    address = "here"

    def __init__(self) -> None:
        self.sent: list[WireRequest] = []

    def open(self, listener: Listener) -> None: ...

    def send(self, frames: Frames) -> None:
        self.sent += unpack_call(frames).requests

    def close(self) -> None: ...


async def test_a_grant_that_comes_between_a_cancellation_and_its_effect_is_given_back() -> None:
    """A task that is cancelled resumes a turn of the loop later; the reply may be read in between."""
    link = Wire()
    connection = Connection(link, "run", "w", DEADLINE_S)
    connection.open()
    asking = asyncio.create_task(connection.request(Grant(token=1), undo=give_back))
    await eventually(lambda: link.sent)
    asking.cancel()
    connection.received(reply(link.sent[0].number, [1, 77]))
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0)
    assert [wire.unpack_value(said.args)["token"] for said in link.sent if said.op == "give_back"] == [77]
