"""One contract for every payload store: what is put is there until it is dropped, wherever it lies meanwhile."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from disk_faults import Disk, full_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_server import RedisServer

from asyncrl.errors import JournalError
from asyncrl.queue.storage import redis_payloads
from asyncrl.queue.storage.file_payloads import FilePayloads
from asyncrl.queue.storage.redis_payloads import RedisPayloads
from asyncrl.queue.storage.redis_run import RedisRun
from asyncrl.queue.storage.store import PayloadBackend, PayloadKey, PayloadStore

Open = Callable[..., PayloadStore]
"""The store as the broker that comes next finds it; keywords go to PayloadStore."""

KINDS = ("memory", "spilling", "file", "fsync", "redis")
DURABLE = ("file", "fsync", "redis")
FRAMES = [b"header", b"", b"x" * 1000]


def opener(kind: str, request: pytest.FixtureRequest, folder: Path) -> Open:
    def open_store(**options: Any) -> PayloadStore:
        shelf: PayloadBackend | None = None
        if kind == "redis":
            server: RedisServer = request.getfixturevalue("redis_server")
            shelf = RedisPayloads(RedisRun(server.url, "it"))
        elif kind != "memory":
            shelf = FilePayloads(
                folder, lasting=kind != "spilling", fsync=kind == "fsync", segment_bytes=2000
            )
        return PayloadStore(shelf, durable=kind in DURABLE, **options)

    return open_store


@pytest.fixture(params=KINDS)
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return opener(request.param, request, tmp_path)


@pytest.fixture(params=DURABLE)
def open_durable(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return opener(request.param, request, tmp_path)


def found(store: PayloadStore, stream: str, ordinal: int, part: str) -> list[bytes]:
    return [bytes(frame) for frame in store.get(stream, ordinal, part)]


def test_parts_are_there_until_they_are_dropped(open_store: Open) -> None:
    store = open_store()
    store.put("train", 1, "group", FRAMES)
    store.put("train", 1, "column/critic", [b"values"])
    store.put("eval", 1, "group", [b"another"])
    store.flush()
    assert found(store, "train", 1, "group") == FRAMES
    assert found(store, "train", 1, "column/critic") == [b"values"]
    assert found(store, "train", 2, "group") == []
    store.put("train", 1, "group", [b"instead"])
    assert found(store, "train", 1, "group") == [b"instead"]
    assert store.sizes().memory == 7 + 6 + 7
    store.drop("train", 1, "group")
    store.drop("train", 1, "group")
    assert found(store, "train", 1, "group") == []
    assert found(store, "train", 1, "column/critic") == [b"values"]
    store.drop("train", 1)
    assert found(store, "train", 1, "column/critic") == []
    assert found(store, "eval", 1, "group") == [b"another"]
    store.put("eval", 1, "progress", [b"something"])
    store.put("eval", 1, "progress", [])
    assert found(store, "eval", 1, "progress") == []
    assert store.sizes().memory == 7
    store.close()


def test_frames_in_memory_are_those_that_came(open_store: Open) -> None:
    """Never copied: the very objects."""
    store = open_store()
    frames = [zmq.Frame(b"header"), zmq.Frame(b"x" * 100)]
    store.put("train", 1, "group", frames)
    store.flush()
    assert store.get("train", 1, "group") is frames
    store.close()


@pytest.mark.parametrize("kind", ["spilling", "file", "redis"])
def test_beyond_the_limit_the_coolest_lie_on_the_shelf_only(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """1,006 bytes a group: of four that are cool one and a bit may stay in memory."""
    store = opener(kind, request, tmp_path)(cool_bytes=1500, tidy_bytes=1)
    for ordinal in range(5):
        store.put("train", ordinal, "group", [*FRAMES[:2], bytes([ordinal]) * 1000])
    store.flush()
    for ordinal in (3, 0, 1, 2):
        store.cool("train", ordinal)
        store.cool("train", ordinal)
    assert (store.sizes().memory, store.sizes().cool) == (5 * 1006, 4 * 1006)
    store.tidy()  # no more than asked for at once
    assert store.sizes().cool == 3 * 1006
    for _ in range(5):
        store.tidy()
    assert (store.sizes().memory, store.sizes().cool) == (2 * 1006, 1006)
    assert store.sizes().shelf == (3 if kind == "spilling" else 5) * 1006
    for ordinal in range(5):
        assert found(store, "train", ordinal, "group") == [*FRAMES[:2], bytes([ordinal]) * 1000]
    for ordinal in range(5):
        store.drop("train", ordinal)
    store.flush()
    store.flush()
    assert store.sizes().memory == store.sizes().cool == store.sizes().shelf == 0
    store.close()


@pytest.mark.parametrize("kind", ["spilling", "file", "redis"])
def test_what_is_put_again_replaces_what_lies_on_the_shelf(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store = opener(kind, request, tmp_path)(cool_bytes=0)
    for frames in ([b"old"], [b"new"]):
        store.put("train", 1, "group", frames)
        store.cool("train", 1)
        store.tidy()
        store.flush()
        assert store.sizes().memory == 0
        assert found(store, "train", 1, "group") == frames
    store.close()


def test_without_a_shelf_everything_stays_in_memory() -> None:
    store = PayloadStore(cool_bytes=0)
    store.put("train", 1, "group", FRAMES)
    store.cool("train", 1)
    store.tidy()
    assert store.sizes().memory == 1006
    assert store.recovered() == {}


def test_what_was_flushed_is_found_again(open_durable: Open) -> None:
    store = open_durable()
    store.put("train", 1, "group", FRAMES, stamp=7)
    store.put("train", 2, "group", [b"two"], stamp=8)
    store.put("train", 2, "group", [b"two again"], stamp=9)
    store.put("train", 3, "progress", [b""])
    store.flush()
    again = open_durable()
    assert again.recovered() == {
        PayloadKey("train", 1, "group"): 7,
        PayloadKey("train", 2, "group"): 9,
        PayloadKey("train", 3, "progress"): 0,
    }
    assert found(again, "train", 1, "group") == FRAMES
    assert found(again, "train", 2, "group") == [b"two again"]
    assert again.sizes().memory == 0
    again.put("train", 2, "group", [b"three times"], stamp=10)
    again.drop("train", 1)
    again.flush()
    again.flush()
    again.close()
    last = open_durable()
    assert last.recovered()[PayloadKey("train", 2, "group")] == 10
    assert found(last, "train", 2, "group") == [b"three times"]
    last.close()


def test_what_is_dropped_lies_there_until_the_journal_says_so_too(open_durable: Open) -> None:
    """The journal is flushed after the store: a broker that dies in between finds a group that it still needs."""
    store = open_durable()
    for ordinal in range(5):  # more than a file of the store takes
        store.put("train", ordinal, "group", FRAMES)
    store.flush()
    for ordinal in range(5):
        store.drop("train", ordinal)
    store.flush()
    again = open_durable()
    for ordinal in range(5):
        assert found(store, "train", ordinal, "group") == []
        assert found(again, "train", ordinal, "group") == FRAMES


def test_a_spilling_store_begins_empty(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    open_store = opener("spilling", request, tmp_path)
    store = open_store(cool_bytes=0)
    store.put("train", 1, "group", FRAMES)
    store.cool("train", 1)
    store.tidy()
    assert store.sizes().shelf == 1006
    assert not list(tmp_path.iterdir())  # files without a name go with their process
    assert open_store().recovered() == {}


# ---------------------------------------------------------------------- against a dictionary

PLACES = st.tuples(
    st.sampled_from(["train", "eval"]), st.integers(0, 3), st.sampled_from(["group", "progress"])
)
STEPS = st.one_of(
    st.tuples(st.just("put"), PLACES, st.lists(st.binary(max_size=600), max_size=3)),
    st.tuples(st.just("drop"), PLACES, st.booleans()),
    st.tuples(st.just("cool"), PLACES, st.none()),
    st.tuples(st.just("flush"), st.none(), st.none()),
    st.tuples(st.just("restart"), st.none(), st.none()),
)


@pytest.mark.parametrize("kind", ["memory", "spilling", "file", "redis"])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, max_size=25))
def test_it_is_a_dictionary_that_may_be_restarted(
    kind: str,
    steps: list[tuple[str, Any, Any]],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("store")
    if kind == "redis":
        request.getfixturevalue("redis_server").client.flushall()
    store = opener(kind, request, folder)(cool_bytes=500)
    model: dict[tuple[str, int, str], list[bytes]] = {}
    for action, place, more in steps:
        if action == "put":
            store.put(*place, more)
            model[place] = more
            model = {p: frames for p, frames in model.items() if frames}
        elif action == "drop":
            store.drop(*place[:2], None if more else place[2])
            model = {p: f for p, f in model.items() if p[:2] != place[:2] or (not more and p != place)}
        elif action == "cool":
            store.cool(*place[:2])
            store.tidy()
        else:
            store.flush()
            store.flush()  # what was dropped goes with the second
        if action == "restart" and kind in DURABLE:
            store.close()
            store = opener(kind, request, folder)(cool_bytes=500)
        assert {place: found(store, *place) for place in model} == model
    assert store.sizes().memory <= sum(len(frame) for frames in model.values() for frame in frames)
    store.flush()
    store.flush()
    if kind in DURABLE:
        # Files may bring back what was dropped in an earlier life.
        assert store.recovered().keys() >= {PayloadKey(*place) for place in model}
    store.close()


# ---------------------------------------------------------------------- files


def test_a_segment_of_which_nothing_is_wanted_is_deleted(tmp_path: Path) -> None:
    shelf = FilePayloads(tmp_path, segment_bytes=2000)
    for ordinal in range(8):
        shelf.write(PayloadKey("train", ordinal, "group"), FRAMES, 0)
    assert len(list(tmp_path.iterdir())) == 4
    for ordinal in (0, 2, 3, 1):
        shelf.erase(PayloadKey("train", ordinal, "group"))
    assert len(list(tmp_path.iterdir())) == 2
    assert shelf.nbytes == 4 * 1006
    shelf.close()


def test_what_is_written_again_leaves_no_segment_behind(tmp_path: Path) -> None:
    """Else the disk fills up, though the queue stays as small as it is."""
    shelf = FilePayloads(tmp_path, segment_bytes=1500)
    for stamp in range(10):
        shelf.write(PayloadKey("train", 1, "progress"), FRAMES, stamp)
    assert len(list(tmp_path.iterdir())) == 1
    assert shelf.nbytes == 1006
    shelf.close()


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_segment_cut_or_damaged_anywhere_gives_whole_payloads_or_none(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shelf")
    shelf = FilePayloads(folder)
    for ordinal in range(3):
        shelf.write(PayloadKey("train", ordinal, "group"), [b"%d" % ordinal, b"xyz"], stamp=ordinal)
    shelf.close()
    (path,) = folder.iterdir()
    packed = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(packed) - 1))
    if data.draw(st.booleans()):
        del packed[at:]
    else:
        packed[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(packed)
    again = FilePayloads(folder)
    stamps = again.stamps()
    assert stamps == {PayloadKey("train", ordinal, "group"): ordinal for ordinal in range(len(stamps))}
    for key in stamps:
        frames = [bytes(frame) for frame in again.read(key)]
        assert [len(frame) for frame in frames] == [
            1,
            3,
        ]  # their own digest tells whether the bytes are right
    again.close()


def test_a_payload_that_cannot_be_replaced_is_still_there_for_whoever_comes_next(tmp_path: Path) -> None:
    key = PayloadKey("train", 0, "group")
    shelf = FilePayloads(tmp_path, segment_bytes=1000)
    shelf.write(key, [b"a" * 1000], 1)  # a segment of its own
    with full_disk(1500), pytest.raises(OSError, match="too large"):
        shelf.write(key, [b"b" * 2000], 2)
    assert [bytes(frame) for frame in shelf.read(key)] == [b"a" * 1000]
    assert [bytes(frame) for frame in FilePayloads(tmp_path).read(key)] == [b"a" * 1000]


def test_a_full_disk_is_an_error_and_leaves_what_was_there(tmp_path: Path) -> None:
    shelf = FilePayloads(tmp_path)
    one, two = PayloadKey("train", 1, "group"), PayloadKey("train", 2, "group")
    shelf.write(one, FRAMES, 1)
    with full_disk(1500), pytest.raises(OSError, match="too large") as full:
        shelf.write(two, FRAMES, 2)
    assert full.value.errno == errno.EFBIG
    assert list(shelf.stamps()) == [one]
    shelf.write(two, [b"small"], 2)
    shelf.close()
    again = FilePayloads(tmp_path)
    assert [list(map(bytes, again.read(key))) for key in (one, two)] == [FRAMES, [b"small"]]
    again.close()


def test_with_fsync_a_power_failure_takes_no_payload_that_was_flushed(disk: Disk) -> None:
    """Of the segment before, and of one that is new; nor does it take the names of both."""
    shelf = FilePayloads(disk.folder, fsync=True, segment_bytes=1500)
    keys = [PayloadKey("train", ordinal, "group") for ordinal in range(4)]
    for flushed, key in enumerate(keys, start=1):
        shelf.write(key, FRAMES, 7)
        shelf.flush()
        for left in disk.after_failures():
            again = FilePayloads(left)
            assert again.stamps() == dict.fromkeys(keys[:flushed], 7)
            assert [list(map(bytes, again.read(one))) for one in keys[:flushed]] == [FRAMES] * flushed
            again.close()
    assert len(list(disk.folder.iterdir())) == 2
    shelf.close()


# ---------------------------------------------------------------------- Redis


def test_what_an_old_broker_writes_is_in_no_index_and_expires(redis_server: RedisServer) -> None:
    old = RedisPayloads(RedisRun(redis_server.url, "it"))
    key = PayloadKey("train", 1, "group")
    old.write(key, [b"old"], 1)
    old.flush()
    new = RedisPayloads(RedisRun(redis_server.url, "it"))
    old.write(key, [b"too late"], 2)
    with pytest.raises(JournalError, match="has taken run it over"):
        old.flush()
    assert new.read(key) == [b"old"]
    assert RedisPayloads(RedisRun(redis_server.url, "it")).stamps() == {key: 1}
    lives = {name: redis_server.client.ttl(name) for name in redis_server.client.keys("*payload*")}
    assert sorted(lives) == [b"asyncrl:{it}:payload:1-1", b"asyncrl:{it}:payload:1-2"]
    assert lives[b"asyncrl:{it}:payload:1-1"] == -1
    assert 0 < lives[b"asyncrl:{it}:payload:1-2"] <= 600


@pytest.mark.parametrize(
    ("field", "entry"), [(b"x", b"y"), (b"\x93\xa1a\x00\xa1b", b"\x94\xa1n\x01\x01\xa1x")]
)
def test_an_index_with_what_no_broker_wrote_is_refused_by_name(
    field: bytes, entry: bytes, redis_server: RedisServer
) -> None:
    redis_server.client.hset("asyncrl:{it}:index", field, entry)
    with pytest.raises(JournalError, match=r"asyncrl:\{it\}:index at redis://.* has what no broker wrote"):
        RedisPayloads(RedisRun(redis_server.url, "it"))


def test_nothing_is_left_of_what_is_dropped(redis_server: RedisServer) -> None:
    store = PayloadStore(RedisPayloads(RedisRun(redis_server.url, "it")), durable=True)
    for ordinal in range(200):
        store.put("train", ordinal, "group", FRAMES)
        store.put("train", ordinal, "group", FRAMES)
    store.flush()
    assert len(redis_server.client.keys("*payload*")) == 200
    for ordinal in range(200):
        store.drop("train", ordinal)
    store.flush()
    store.flush()
    assert redis_server.client.keys("*payload*") == []
    assert redis_server.client.hlen("asyncrl:{it}:index") == 0


def test_a_payload_that_redis_has_lost_comes_back_empty(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no group any more, which whoever gets it finds out."""
    shelf = RedisPayloads(RedisRun(redis_server.url, "it"))
    shelf.write(PayloadKey("train", 1, "group"), FRAMES, 1)
    shelf.flush()
    redis_server.client.delete("asyncrl:{it}:payload:1-1")
    assert shelf.read(PayloadKey("train", 1, "group")) == [b"", b"", b""]
    assert "has lost the payload of" in caplog.text


def test_a_broker_that_takes_over_makes_the_payloads_stay_and_leaves_out_lost_ones(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Their groups are made again, as if they had never been there."""
    old = RedisPayloads(RedisRun(redis_server.url, "it"))
    keys = [PayloadKey("train", ordinal, "group") for ordinal in range(100)]
    for key in keys:
        old.write(key, FRAMES, 1)
    old.flush()
    redis_server.client.delete("asyncrl:{it}:payload:1-100")
    redis_server.client.expire("asyncrl:{it}:payload:1-1", 600)
    new = RedisPayloads(RedisRun(redis_server.url, "it"))
    assert new.stamps() == dict.fromkeys(keys[:-1], 1)
    assert redis_server.client.ttl("asyncrl:{it}:payload:1-1") == -1
    assert caplog.text.count("has lost the payload of") == 1
    new.flush()
    assert redis_server.client.hlen("asyncrl:{it}:index") == 99


def test_a_payload_stays_until_the_one_that_replaces_it_is_there(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker dies between two parts of a flush."""
    first, second = (PayloadKey("train", ordinal, "group") for ordinal in range(2))
    run = RedisRun(redis_server.url, "it")
    old = RedisPayloads(run)
    old.write(first, FRAMES, 1)
    old.flush()
    monkeypatch.setattr(redis_payloads, "BATCH", 1)
    old.write(second, FRAMES, 2)
    old.write(first, FRAMES[:1], 3)
    pipeline, parts = run.pipeline, itertools.count()
    monkeypatch.setattr(run, "pipeline", lambda fill: pipeline(fill) if next(parts) == 0 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        old.flush()
    new = RedisPayloads(RedisRun(redis_server.url, "it"))
    assert new.stamps() == {first: 1, second: 2}
    assert new.read(first) == list(FRAMES)


def test_a_flush_whose_answer_was_lost_is_sent_again(own_redis: RedisServer) -> None:
    shelf = RedisPayloads(RedisRun(own_redis.url, "it"))
    shelf.write(PayloadKey("train", 1, "group"), FRAMES, 1)
    shelf.flush()
    own_redis.kill()
    own_redis.start()
    shelf.write(PayloadKey("train", 2, "group"), FRAMES, 2)
    shelf.erase(PayloadKey("train", 1, "group"))
    shelf.flush()
    assert RedisPayloads(RedisRun(own_redis.url, "it")).stamps() == {PayloadKey("train", 2, "group"): 2}
