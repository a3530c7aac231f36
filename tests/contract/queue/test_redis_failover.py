"""Redis behind a sentinel: a primary that dies or stops is replaced, and nothing that counted is lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import missing
import psutil
import pytest
from processes import until

from asyncrl.errors import DeadlineError, JournalError
from asyncrl.queue.storage.redis_journal import RedisJournal
from asyncrl.queue.storage.redis_payloads import RedisPayloads
from asyncrl.queue.storage.redis_run import RedisRun
from asyncrl.queue.storage.store import PayloadKey
from asyncrl.sync.store.redis_blobs import RedisBlobs
from asyncrl.system import redis_place
from bench.chaos.redis_pair import RedisPair

KEY = PayloadKey("train", 0, "group")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[RedisPair]:
    if shutil.which("redis-server") is None:
        pytest.skip(missing.REDIS)
    pair = RedisPair(tmp_path / "redis")
    yield pair
    pair.close()


def replaced(pair: RedisPair, port: int) -> None:
    until(lambda: pair.primary != port, "a failover")


class Broker:
    """What a broker keeps in Redis."""

    def __init__(self, pair: RedisPair) -> None:
        self.place = place = RedisRun(pair.url, "it", deadline_s=30.0)
        self.epoch = place.epoch
        self.journal, self.payloads = RedisJournal(place), RedisPayloads(place)
        self.found = list(self.journal.replay())

    def write(self, record: bytes) -> None:
        """The record, and a payload with the same bytes."""
        self.payloads.write(KEY, [record], 1)
        self.payloads.flush()
        self.journal.append(record)
        self.journal.flush()


def test_the_next_primary_has_all_that_counted(pair: RedisPair) -> None:
    broker = Broker(pair)
    for record in (b"first", b"second"):
        broker.write(record)
        port = pair.kill()
        shutil.rmtree(pair.folder_of(port) / "appendonlydir")  # its disk is gone, too
        replaced(pair, port)
        pair.start(port)
    broker.write(b"third")
    later = Broker(pair)
    assert later.found == [b"first", b"second", b"third"]
    assert later.payloads.read(KEY) == [b"third"]
    with pytest.raises(JournalError, match=f"broker {later.epoch} has taken run it over"):
        broker.write(b"too late")


def test_a_write_that_no_replica_has_does_not_count_and_is_kept_once_it_has(
    pair: RedisPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that is tried again, which finds its work done."""
    monkeypatch.setattr(redis_place, "REPLICATED_S", 0.2)
    broker = Broker(pair)
    replica = psutil.Process(pair.replica_pid)
    replica.suspend()
    with monkeypatch.context() as briefly:
        briefly.setattr(broker.place._place, "_deadline_s", 1.0)
        with pytest.raises(DeadlineError, match=r"waited 1.0 s for Redis at redis\+sentinel://127"):
            broker.write(b"once")
    replica.resume()
    pair.until_whole()
    broker.write(b"once")
    assert Broker(pair).found == [b"once"]


@pytest.mark.slow
def test_a_primary_that_stands_still_and_comes_back_takes_no_write(pair: RedisPair) -> None:
    """It does not know that another has its place: what it takes has no replica. The sentinel corrects it after 8 s."""
    broker = Broker(pair)
    broker.write(b"before")
    port, old = pair.primary, psutil.Process(pair.primary_pid)
    old.suspend()
    replaced(pair, port)
    old.resume()
    broker.write(b"after")
    assert Broker(pair).found == [b"before", b"after"]


def test_stored_weights_outlive_their_primary(pair: RedisPair) -> None:
    blobs = RedisBlobs(pair.url, "it", chunk=1000)
    blobs.put("rank-00000/0-ab/00000001.manifest", [bytes(4500)])
    port = pair.kill()
    replaced(pair, port)
    pair.start(port)
    assert blobs.get("rank-00000/0-ab/00000001.manifest") == bytes(4500)
    blobs.close()
