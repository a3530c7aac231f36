"""A client and its broker, with one bit between them changed: each bit of a request, and of the reply to it.

TCP's checksum of 16 bits lets some changed packets through, and ZeroMQ's own bytes (flags, lengths) have no
other. They may end the connection, shift all that follows, or keep what follows from being taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from queue_cases import WAIT_S, serving

from asyncrl.queue.broker import broker as broker_module
from asyncrl.queue.broker.broker import Broker
from asyncrl.queue.client import link, session
from asyncrl.queue.client.client import QueueClient
from asyncrl.rpc.keys import client_keys, make_keys, server_keys

HEAD = 10
"""Bytes of ZeroMQ before a frame: flags and length, and the first of its own."""

REQUEST = 120
"""Bytes of the request, about, and of the reply's first frames."""

AT_ONCE = 10
VALUE = "x" * 300
"""Longer than a frame whose length is one byte."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """All times of the two sides in their usual relation, 25 times as short."""
    for module, name in (
        (broker_module, "HEARTBEAT_MS"),
        (link, "HEARTBEAT_MS"),
        (link, "GIVEN_UP_S"),
        (session, "RESEND_S"),
        (session, "RENEW_S"),
    ):
        usual = getattr(module, name)
        monkeypatch.setattr(module, name, type(usual)(usual / 25))


class BitChanger:
    """A proxy of one connection after the other."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._left: dict[str, int] = {}
        self._mask = 0

    def change(self, way: str, at: int, bit: int) -> None:
        """This bit of the byte that is `at` bytes away on this way, 'up' to the server or 'down'."""
        self._left, self._mask = {way: at}, 1 << bit

    @property
    def changed(self) -> bool:
        return not self._left

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        yield int(server.sockets[0].getsockname()[1])
        server.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up, down = await asyncio.open_connection("127.0.0.1", self._server)
        await asyncio.gather(self._pump("up", reader, down), self._pump("down", up, writer))

    async def _pump(self, way: str, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := bytearray(await source.read(1 << 16)):
                if (at := self._left.pop(way, None)) is not None:
                    if at < len(piece):
                        piece[at] ^= self._mask
                    else:
                        self._left[way] = at - len(piece)
                to.write(piece)
                await to.drain()
        to.close()


async def answered(broker: Broker, keys: str | None, way: str, at: int, bit: int) -> None:
    """A lookup, in which a bit is changed ('up') or in its reply ('down')."""
    changer = BitChanger(int(broker.bound_address.rpartition(":")[2]))
    async with changer.listening() as port:
        client = client_of(f"tcp://127.0.0.1:{port}", keys, f"the one with bit {bit} of byte {at} changed")
        try:
            await client.connect()
            changer.change(way, at, bit)
            assert await client.lookup("value", 0.0) == VALUE
            assert changer.changed
        finally:
            await client.close()


def client_of(address: str, keys: str | None, who: str) -> QueueClient:
    return QueueClient(address, run="run", who=who, deadline_s=3 * WAIT_S, keys=client_keys(keys))


@pytest.fixture(params=["plain", "encrypted"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    if request.param == "plain":
        return None
    make_keys(tmp_path / "keys")
    return str(tmp_path / "keys")


@pytest.fixture
def broker(quick: None, keys: str | None) -> Iterator[Broker]:
    made = server_keys(keys) if keys else None
    with serving(Broker("tcp://127.0.0.1:*", "run", keys=made)) as broker:
        yield broker


@asynccontextmanager
async def posted(broker: Broker, keys: str | None = None) -> AsyncIterator[None]:
    """The value that lookups are for."""
    poster = client_of(broker.bound_address, keys, "poster")
    await poster.connect()
    await poster.post("value", VALUE)
    try:
        yield
    finally:
        await poster.close()


async def all_answered(broker: Broker, keys: str | None, way: str, first: int) -> None:
    """Each bit of the first bytes."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(at: int, bit: int) -> None:
        async with turn:
            await answered(broker, keys, way, at, bit)

    async with posted(broker, keys), asyncio.TaskGroup() as group:
        for at in range(first):
            for bit in range(8):
                group.create_task(one(at, bit))


@pytest.mark.parametrize("way", ["up", "down"])
async def test_a_request_is_answered_though_a_bit_was_changed(
    broker: Broker, keys: str | None, way: str
) -> None:
    await all_answered(broker, keys, way, HEAD)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["up", "down"])
async def test_so_it_is_whichever_bit(way: str) -> None:
    """Encrypted bytes are all alike."""
    with serving(Broker("tcp://127.0.0.1:*", "run")) as broker:
        await all_answered(broker, None, way, REQUEST)


async def test_a_connection_that_passes_nothing_on_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without heartbeats nothing else would end it: a length that is larger by 64 KiB swallows all replies."""
    for module in (broker_module, link):
        monkeypatch.setattr(module, "HEARTBEAT_MS", 0)
    with serving(Broker("tcp://127.0.0.1:*", "run")) as broker:
        async with posted(broker):
            await answered(broker, None, "down", 6, 0)
