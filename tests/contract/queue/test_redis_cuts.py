"""A connection to Redis that breaks at each byte of a flush and of its answers, and a broker that takes over then."""

from __future__ import annotations

from collections.abc import Iterator

import msgpack
import pytest
from cutting_proxy import CuttingProxy
from processes import until
from redis_server import RedisServer

from asyncrl.errors import JournalError
from asyncrl.queue.storage.redis_journal import RedisJournal
from asyncrl.queue.storage.redis_payloads import RedisPayloads
from asyncrl.queue.storage.redis_run import RedisRun
from asyncrl.queue.storage.store import PayloadKey
from asyncrl.system import redis_place

GONE, AGAIN, NEW = (PayloadKey("train", ordinal, "group") for ordinal in range(3))
BEFORE = {GONE: 1, AGAIN: 1}
AFTER = {AGAIN: 2, NEW: 2}
MEASURED = 99_999
"""Stands for the cut in the name of the run that is not cut."""


@pytest.fixture
def proxy(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuttingProxy]:
    monkeypatch.setattr(redis_place, "PAUSE_S", 0.0)
    proxy = CuttingProxy(redis_server.port)
    yield proxy
    proxy.close()


class Broker:
    """What a broker keeps in Redis."""

    def __init__(self, port: int, run: str) -> None:
        place = RedisRun(f"redis://127.0.0.1:{port}/0", run)
        self.journal, self.payloads = RedisJournal(place), RedisPayloads(place)
        self.found = list(self.journal.replay())

    def begin(self) -> None:
        self._write(BEFORE, b"before")

    def go_on(self) -> None:
        """The flush that is cut: one payload is new, one takes the place of another, one goes."""
        self.payloads.erase(GONE)
        self._write(AFTER, b"after")

    def _write(self, stamps: dict[PayloadKey, int], record: bytes) -> None:
        for key, stamp in stamps.items():
            self.payloads.write(key, [bytes([key.ordinal, stamp]), b"frame"], stamp)
        self.payloads.flush()
        self.journal.append(record)
        self.journal.flush()


def assert_kept(server: RedisServer, run: str, stamps: dict[PayloadKey, int], records: list[bytes]) -> None:
    """The next broker finds these, none of them is about to expire, and nothing else stays."""
    names = server.client.hvals(f"asyncrl:{{{run}}}:index")
    indexed = {f"asyncrl:{{{run}}}:payload:{msgpack.unpackb(packed)[0]}".encode() for packed in names}
    lives = {name: server.client.ttl(name) for name in server.client.keys(f"asyncrl:{{{run}}}:payload:*")}
    assert {name for name, life in lives.items() if life == -1} == indexed
    assert len(names) == len(indexed) == len(stamps)
    last = Broker(server.port, run)
    assert last.payloads.stamps() == stamps
    for key, stamp in stamps.items():
        assert last.payloads.read(key) == [bytes([key.ordinal, stamp]), b"frame"]
    assert last.found == records


def run_at(at: int) -> str:
    """A run's name for each cut; all are of one length, and so is what is sent for them."""
    return f"run{at:05}"


def length(proxy: CuttingProxy, side: str) -> int:
    broker = Broker(proxy.port, run_at(MEASURED))
    broker.begin()
    proxy.cut_after(side, -1)
    broker.go_on()
    return proxy.counted[side]


CUTS = pytest.mark.parametrize(
    ("side", "every"), [("sent", 43), ("answered", 3), pytest.param("sent", 1, marks=pytest.mark.slow)]
)
"""Which side is cut, and at each which byte of it."""


@CUTS
def test_a_flush_that_is_cut_anywhere_is_kept_once(
    proxy: CuttingProxy, redis_server: RedisServer, side: str, every: int
) -> None:
    for at in range(0, length(proxy, side), every):
        broker = Broker(proxy.port, run := run_at(at))
        broker.begin()
        proxy.cut_after(side, at)
        broker.go_on()
        assert_kept(redis_server, run, AFTER, [b"before", b"after"])


@CUTS
def test_a_broker_that_takes_over_at_the_cut_has_all_or_nothing_of_it(
    proxy: CuttingProxy, redis_server: RedisServer, side: str, every: int
) -> None:
    """The first one sends its flush again, which must not touch what the second has found."""
    for at in range(0, length(proxy, side), every):
        first = Broker(proxy.port, run := run_at(at))
        first.begin()
        next_ones: list[Broker] = []
        proxy.cut_after(
            side, at, lambda run=run, next_ones=next_ones: next_ones.append(Broker(redis_server.port, run))
        )
        with pytest.raises(JournalError):
            first.go_on()
        # The first one may have failed before the constructor of the second has returned.
        until(lambda next_ones=next_ones: next_ones, "the broker that takes over")
        (second,) = next_ones
        stamps = dict(second.payloads.stamps())
        assert (stamps, second.found) in (
            (BEFORE, [b"before"]),
            (AFTER, [b"before"]),
            (AFTER, [b"before", b"after"]),
        )
        assert_kept(redis_server, run, stamps, second.found)
