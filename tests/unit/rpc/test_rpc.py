"""One server and its clients: replies now, later and never; refusals; a cut connection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import zmq

from asyncrl.errors import ConfigError, DeadlineError, RefusedError, WeightSyncError
from asyncrl.rpc.client import RpcClient
from asyncrl.rpc.message import Fields
from asyncrl.rpc.server import RpcRequest, RpcServer

WAIT_S = 20.0


def test_without_keys_a_server_listens_on_loopback_alone() -> None:
    with pytest.raises(ConfigError, match=r"pool would listen at 0\.0\.0\.0, which other machines can reach"):
        RpcServer("0.0.0.0", "pool", lambda request: None)


class Counter:
    """Handles requests: `now` at once, `later` at the next wake-up, `never`, `late` by another thread."""

    def __init__(self) -> None:
        self.later: Fields | None = None
        self.late: list[RpcRequest] = []
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
            case "refused":
                raise RefusedError("full", "no room")
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
