"""One server and its clients: replies now, later and never; refusals; a cut connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import psutil
import pytest
import zmq

from asyncrl.errors import ConfigError, DeadlineError, RefusedError, WeightSyncError
from asyncrl.rpc.client import RpcClient
from asyncrl.rpc.message import Fields, decode, encode
from asyncrl.rpc.server import LONGEST_DETAIL, RpcRequest, RpcServer

WAIT_S = 20.0
MANY, LARGE = 40, 4 << 20


def test_without_keys_a_server_listens_on_loopback_alone() -> None:
    with pytest.raises(ConfigError, match=r"pool would listen at 0\.0\.0\.0, which other machines can reach"):
        RpcServer("0.0.0.0", "pool", lambda request: None)


class Counter:
    """Handles requests: `now` at once, `later` at the next wake-up, `never`, `late` by another thread."""

    def __init__(self) -> None:
        self.later: Fields | None = None
        self.late: list[RpcRequest] = []
        self.large = 0
        self.came = threading.Event()
        self.server = RpcServer("127.0.0.1", "counter", self.handle)

    def handle(self, request: RpcRequest) -> Fields | None:
        match request.kind:
            case "now":
                return {"twice": 2 * request.fields["number"]}
            case "later":
                self.server.park(request, lambda: self.later, WAIT_S, {})
            case "late":
                self.late.append(request)
                self.came.set()
            case "large":
                self.large += 1
                if self.large == MANY:
                    self.came.set()
                return {"bytes": bytes(LARGE)}
            case "refused":
                raise RefusedError("full", request.fields.get("why", "no room"))
        return None


@pytest.fixture
def counter() -> Iterator[Counter]:
    counter = Counter()
    yield counter
    counter.server.close()


@pytest.fixture
def connect() -> Iterator[Callable[[str], RpcClient]]:
    with ExitStack() as closing:

        def connected(endpoint: str) -> RpcClient:
            client = RpcClient(endpoint, "a client", "the counter", WeightSyncError)
            closing.callback(client.close)
            return client

        yield connected


def test_replies_come_now_or_after_a_wakeup_or_from_another_thread(
    counter: Counter, connect: Callable[[str], RpcClient]
) -> None:
    client = connect(counter.server.endpoint)
    later = client.request("later", {})
    late = client.request("late", {})
    assert client.call("now", {"number": 4}, "a product", WAIT_S) == {"twice": 8}
    assert not later.done()
    counter.later = {"at": "last"}
    counter.server.wake()
    assert client.wait(later, "a later reply", WAIT_S) == {"at": "last"}
    assert counter.came.wait(WAIT_S)
    counter.server.reply(counter.late[0], {"by": "another thread"})
    assert client.wait(late, "a late reply", WAIT_S) == {"by": "another thread"}


def test_a_refusal_names_the_server(counter: Counter, connect: Callable[[str], RpcClient]) -> None:
    client = connect(counter.server.endpoint)
    with pytest.raises(RefusedError, match=r"full: the counter at tcp://.*: no room"):
        client.call("refused", {}, "room", WAIT_S)
    with pytest.raises(RefusedError, match="malformed"):
        client.call("now", {}, "a product", WAIT_S)
    assert counter.server.malformed == 1


def test_a_request_that_was_changed_on_its_way_fails_at_once_and_so_do_those_beside_it(
    counter: Counter, connect: Callable[[str], RpcClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side knows which request it was: the client begins a new connection, and asks again."""
    client = connect(counter.server.endpoint)
    waiting = client.request("never", {})
    monkeypatch.setattr("asyncrl.rpc.client.encode", lambda *request: encode(*request)[:-1] + b"?")
    for reply in (client.request("now", {"number": 4}), waiting):
        with pytest.raises(WeightSyncError, match="a request arrived there unreadable"):
            client.wait(reply, "a product", WAIT_S)
    assert counter.server.malformed == 1


def test_an_error_quotes_no_more_of_a_request_than_a_bound(
    counter: Counter, connect: Callable[[str], RpcClient]
) -> None:
    client = connect(counter.server.endpoint)
    for reply in (client.request("refused", {"why": "x" * 100_000}), client.request("now", {"number": None})):
        with pytest.raises(RefusedError) as refused:
            client.wait(reply, "room", WAIT_S)
        assert len(str(refused.value)) < 2 * LONGEST_DETAIL


def test_a_peer_that_leaves_large_replies_unread_gets_no_more_of_them(counter: Counter) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as silent:
        silent.setsockopt(zmq.LINGER, 0)
        silent.setsockopt(zmq.RCVHWM, 1)
        silent.connect(counter.server.endpoint)

        def answer() -> str:
            assert silent.poll(1000 * WAIT_S)
            _, verdict, fields = decode(silent.recv())
            return str(fields.get("reason", verdict))

        for number in range(MANY):
            silent.send(encode(number, "large", {}))
        assert counter.came.wait(WAIT_S)
        assert set(answers := [answer() for _ in range(MANY)]) == {"ok", "busy"}
        assert answers.count("ok") < MANY // 2, "those of the server, and those on their way"
        silent.send(encode(0, "large", {}))
        assert answer() == "ok"


@pytest.mark.slow
def test_a_peer_that_takes_nothing_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[[str], RpcClient]
) -> None:
    monkeypatch.setattr("asyncrl.rpc.server.UNREAD_MS", 500)
    counter = Counter()
    with closing(counter.server), zmq.Context() as context, context.socket(zmq.DEALER) as silent:
        port = int(counter.server.endpoint.rpartition(":")[2])

        def connected() -> int:
            every = psutil.Process().net_connections("tcp")
            return sum(one.laddr.port == port and one.status == "ESTABLISHED" for one in every)

        for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 4096), (zmq.LINGER, 0)):
            silent.setsockopt(option, value)
        silent.connect(counter.server.endpoint)
        for number in range(MANY):
            silent.send(encode(number, "large", {}))
        assert counter.came.wait(WAIT_S)
        client, end = connect(counter.server.endpoint), time.monotonic() + WAIT_S
        while client.call("now", {"number": 1}, "a product", WAIT_S) and connected() > 1:
            assert time.monotonic() < end


def test_a_reply_after_the_deadline_is_ignored(counter: Counter, connect: Callable[[str], RpcClient]) -> None:
    client = connect(counter.server.endpoint)
    with pytest.raises(DeadlineError, match=r"a client waited 0\.0 s for the counter at tcp://.*: a reply"):
        client.call("late", {}, "a reply", 0.0)
    assert counter.came.wait(WAIT_S)
    counter.server.reply(counter.late[0], {})
    assert client.call("now", {"number": 1}, "a product", WAIT_S) == {"twice": 2}
    client.check()


def test_a_cut_connection_fails_what_waits_and_what_is_requested_afterwards(
    counter: Counter, connect: Callable[[str], RpcClient]
) -> None:
    client = connect(counter.server.endpoint)
    waiting = client.request("late", {})
    assert counter.came.wait(WAIT_S)
    counter.server.close()
    for reply in (waiting, client.request("now", {"number": 1})):
        with pytest.raises(WeightSyncError, match=r"a client has lost the counter.*it was to give a product"):
            client.wait(reply, "a product", WAIT_S)
    with pytest.raises(WeightSyncError, match="a client has lost the counter"):
        client.check()


def test_a_reply_that_cannot_be_read_ends_the_connection(connect: Callable[[str], RpcClient]) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        client = connect(f"tcp://127.0.0.1:{port}")
        reply = client.request("now", {})
        peer, _ = router.recv_multipart()
        router.send_multipart([peer, b"\xc1"])
        with pytest.raises(WeightSyncError, match="its reply cannot be read"):
            client.wait(reply, "a product", WAIT_S)
