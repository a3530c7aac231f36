"""The proxy of bench.chaos: what it passes, delays, cuts and corrupts; and what the queue's two ends make of it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from queue_cases import serving

from asyncrl.queue.broker.broker import Broker
from asyncrl.queue.client.client import BlockingClient, QueueClient
from asyncrl.rpc.keys import client_keys, make_keys, server_keys
from bench.chaos.proxy import Proxy, port_towards

WAIT_S = 20.0


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with closing(Proxy(seed=1)) as proxy:
        yield proxy


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(one: socket.socket) -> None:
            with one, suppress(OSError):
                while got := one.recv(1 << 16):
                    one.sendall(got)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield int(listener.getsockname()[1])
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def through(proxy: Proxy, port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_towards(port, proxy.port)), WAIT_S)


def echoed(connection: socket.socket, text: bytes) -> bytes:
    connection.sendall(text)
    got = b""
    while len(got) < len(text) and (more := connection.recv(1 << 16)):
        got += more
    return got


def test_what_passes_is_unchanged_also_when_it_is_late(proxy: Proxy, echo: int) -> None:
    with through(proxy, echo) as one, through(proxy, echo) as other:
        assert echoed(one, b"a" * 100_000) == b"a" * 100_000
        proxy.delay(1.0)
        assert echoed(other, b"late") == b"late"
    assert not proxy.corrupted


def test_a_cut_ends_connections_and_refuses_new_ones_for_a_while(proxy: Proxy, echo: int) -> None:
    with through(proxy, echo) as one:
        assert echoed(one, b"x") == b"x"
        port = port_towards(echo, proxy.port)
        assert proxy.cut(0.3) == 1
        assert echoed(one, b"x") == b""
        assert port_towards(echo, proxy.port) == port
    while True:
        with suppress(OSError), through(proxy, echo) as again:
            if echoed(again, b"x") == b"x":
                return


def test_one_byte_of_a_piece_is_changed_and_counted(proxy: Proxy, echo: int) -> None:
    with through(proxy, echo) as one:
        proxy.corrupt(1)
        changed = echoed(one, bytes(1000))
        assert sum(byte != 0 for byte in changed) == 1
        assert echoed(one, bytes(1000)) == bytes(1000)
    assert proxy.corrupted == {echo: 1}


class Queue:
    """A broker, and a client that reaches it through the proxy.

    keys: their folder, or None
    """

    def __init__(self, proxy: Proxy, keys: str | None, closing: ExitStack) -> None:
        self.broker = Broker("tcp://127.0.0.1:*", "run", keys=server_keys(keys))
        closing.enter_context(serving(self.broker))
        self.port = int(self.broker.bound_address.rpartition(":")[2])
        self._keys, self._closing = client_keys(keys), closing
        self.client = self.connected(f"tcp://127.0.0.1:{port_towards(self.port, proxy.port)}")

    def connected(self, address: str) -> BlockingClient:
        queue = QueueClient(address, run="run", who="a", deadline_s=3 * WAIT_S, keys=self._keys)
        client = BlockingClient(queue)
        self._closing.callback(client.close)
        client.connect()
        return client


def test_a_request_that_was_changed_on_its_way_is_refused_and_repeated(proxy: Proxy) -> None:
    with ExitStack() as closing:
        queue = Queue(proxy, None, closing)
        proxy.corrupt(1, at=-1)
        queue.client.post("key", b"value")
        assert queue.client.lookup("key", 0.0) == b"value"
        assert queue.client.status()["refused"] == {"malformed": 1}
        assert proxy.corrupted == {queue.port: 1}


def test_an_encrypted_reply_that_was_changed_on_its_way_is_sent_again(proxy: Proxy, tmp_path: Path) -> None:
    """libzmq calls it a failed handshake; the keys fit nevertheless."""
    make_keys(tmp_path / "keys")
    with ExitStack() as closing, ThreadPoolExecutor() as threads:
        queue = Queue(proxy, str(tmp_path / "keys"), closing)
        direct = queue.connected(queue.broker.bound_address)
        looking = threads.submit(queue.client.lookup, "key", WAIT_S)
        end = time.monotonic() + WAIT_S
        while not queue.broker.dispatcher.parked:
            assert time.monotonic() < end
        proxy.corrupt(1, at=-1)
        direct.post("key", b"value")
        assert looking.result(2 * WAIT_S) == b"value"
        assert proxy.corrupted == {queue.port: 1}
