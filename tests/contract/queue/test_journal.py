"""One contract for every journal, and what each says when what it wrote is not what it reads."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_faults import Disk, full_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_journal import MemoryJournal
from processes import free_port
from redis_server import RedisServer
from waiting import eventually

from asyncrl.config.schema import QueueConfig
from asyncrl.errors import ConfigError, DeadlineError, JournalError
from asyncrl.queue.broker.recovery import open_recovery
from asyncrl.queue.storage.file_journal import FileJournal
from asyncrl.queue.storage.journal import Journal
from asyncrl.queue.storage.redis_journal import RedisJournal
from asyncrl.queue.storage.redis_run import RedisRun

Open = Callable[[], Journal]
"""The journal as a broker that comes next finds it."""


@pytest.fixture(params=["memory", "file", "fsync", "redis"])
def open_journal(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "memory":
        kept: list[bytes] = []
        return lambda: MemoryJournal(kept)
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        return lambda: RedisJournal(RedisRun(server.url, "it"), least_overgrown=500)
    return lambda: FileJournal(tmp_path, "it", fsync=request.param == "fsync", least_overgrown=500)


def write(journal: Journal, *bursts: list[bytes]) -> None:
    for burst in bursts:
        for record in burst:
            journal.append(record)
        journal.flush()


def read(journal: Journal) -> list[bytes]:
    return list(journal.replay())


def test_what_was_flushed_comes_back_in_order(open_journal: Open) -> None:
    journal = open_journal()
    assert read(journal) == []
    write(journal, [b"a", b"", b"\xa5BAT"], [], [b"b" * 100_000])
    journal.close()
    journal.close()
    again = open_journal()
    assert read(again) == [b"a", b"", b"\xa5BAT", b"b" * 100_000]
    write(again, [b"c"])
    again.close()
    last = open_journal()
    assert read(last)[-1] == b"c"
    last.close()


def test_a_snapshot_takes_the_place_of_everything_before(open_journal: Open) -> None:
    journal = open_journal()
    assert read(journal) == []
    write(journal, [b"old"])
    journal.append(b"not flushed")
    journal.compact(iter([b"snapshot", b"x" * (1 << 20), b"more"]))
    write(journal, [b"new"])
    journal.compact(iter([b"snapshot", b"x"]))
    write(journal, [b"newer"])
    journal.close()
    again = open_journal()
    assert read(again) == [b"snapshot", b"x", b"newer"]
    again.close()


@pytest.mark.parametrize("kind", ["file", "redis"])
def test_it_is_overgrown_when_it_is_some_times_its_snapshot(
    kind: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    """Least 500 bytes, and four times the snapshot."""
    if kind == "file":
        journal: Journal = FileJournal(tmp_path, "it", least_overgrown=500)
    else:
        journal = RedisJournal(RedisRun(redis_server.url, "it"), least_overgrown=500)
    read(journal)
    write(journal, [b"x" * 100])
    assert not journal.overgrown
    write(journal, [b"x" * 500])
    assert journal.overgrown
    journal.compact([b"x" * 1000])
    assert not journal.overgrown
    write(journal, [b"x" * 2500])
    assert not journal.overgrown
    write(journal, [b"x" * 1000])
    assert journal.overgrown
    journal.close()


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("store", ["file", "redis"])
def test_a_journal_of_the_schema_before_is_read_and_replaced(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def opened(schema: str, before: str | None = None) -> Journal:
        if store == "file":
            return FileJournal(tmp_path, "it", schema, before)
        return RedisJournal(RedisRun(request.getfixturevalue("redis_server").url, "it"), schema, before)

    old = opened("old")
    assert read(old) == []
    write(old, [b"a", b"b"])
    old.close()
    for before in (None, ""):
        refused = opened("new", before)
        with pytest.raises(JournalError, match="another version"):
            read(refused)
        refused.close()
    journal = opened("new", "old")
    assert read(journal) == [b"a", b"b"]
    assert journal.outdated
    journal.compact([b"c"])
    assert not journal.outdated
    write(journal, [b"d"])
    journal.close()
    again = opened("new", "old")
    assert read(again) == [b"c", b"d"]
    assert not again.outdated
    again.close()


def file_journal(folder: Path, run: str = "it", schema: str = "") -> FileJournal:
    return FileJournal(folder, run, schema)


def written(folder: Path, bursts: list[list[bytes]]) -> list[bytes]:
    journal = file_journal(folder)
    read(journal)
    write(journal, *bursts)
    journal.close()
    return [record for burst in bursts for record in burst]


BURSTS = st.lists(st.lists(st.binary(max_size=12) | st.just(b"\xa5BAT"), min_size=1, max_size=3), max_size=4)
ON_DISK = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150
)


@ON_DISK
@given(bursts=BURSTS, data=st.data())
def test_cut_anywhere_it_gives_a_prefix_of_whole_bursts(
    bursts: list[list[bytes]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    path = folder / "journal"
    file_journal(folder).close()
    header = path.stat().st_size
    written(folder, bursts)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    journal = file_journal(folder)
    if len(path.read_bytes()) < header:
        with pytest.raises(JournalError, match=r"no journal of this version|no readable header"):
            read(journal)
        journal.close()
        return
    found = read(journal)
    prefixes = [[record for burst in bursts[:n] for record in burst] for n in range(len(bursts) + 1)]
    assert found in prefixes
    write(journal, [b"after"])
    journal.close()
    again = file_journal(folder)
    assert read(again) == [*found, b"after"]
    again.close()


@ON_DISK
@given(bursts=BURSTS, data=st.data())
def test_a_flipped_byte_costs_the_last_burst_or_is_refused(
    bursts: list[list[bytes]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It costs the last burst if it is in it: a torn tail looks the same."""
    folder = tmp_path_factory.mktemp("journal")
    before = written(folder, bursts[:-1])
    path = folder / "journal"
    kept = path.stat().st_size
    written(folder, bursts[-1:])
    packed = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(packed)
    journal = file_journal(folder)
    if at >= kept:
        assert read(journal) == before
    else:
        with pytest.raises(JournalError):
            read(journal)
    journal.close()


def test_damage_in_the_middle_names_the_place(tmp_path: Path) -> None:
    written(tmp_path, [[b"first"], [b"second"], [b"third"]])
    path = tmp_path / "journal"
    packed = bytearray(path.read_bytes())
    at = packed.index(b"second")
    packed[at] ^= 1
    path.write_bytes(packed)
    journal = file_journal(tmp_path)
    with pytest.raises(
        JournalError, match=r"journal is damaged at byte \d+: there are good records behind it"
    ):
        read(journal)
    journal.close()


def test_a_torn_tail_is_cut_off_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path, [[b"first"], [b"second"]])
    path = tmp_path / "journal"
    path.write_bytes(path.read_bytes()[:-3])
    journal = file_journal(tmp_path)
    assert read(journal) == [b"first"]
    assert "a torn tail of" in caplog.text
    journal.close()


def test_one_broker_at_a_time(tmp_path: Path) -> None:
    first = file_journal(tmp_path)
    with pytest.raises(JournalError, match=r"another broker .* uses"):
        file_journal(tmp_path)
    first.close()
    file_journal(tmp_path).close()


def test_the_journal_of_another_run_or_version_is_refused(tmp_path: Path) -> None:
    file_journal(tmp_path).close()
    other = file_journal(tmp_path, run="other")
    with pytest.raises(JournalError, match="is of run 'it', not 'other'"):
        read(other)
    other.close()
    newer = file_journal(tmp_path, schema="Leased(ordinal)")
    with pytest.raises(JournalError, match=r"another version of asyncrl\. Remedy: "):
        read(newer)
    newer.close()


def test_a_full_disk_is_an_error_and_leaves_whole_bursts(tmp_path: Path) -> None:
    journal = file_journal(tmp_path)
    read(journal)
    write(journal, [b"fits"])
    journal.append(b"x" * 1000)
    size = (tmp_path / "journal").stat().st_size + 500
    with full_disk(size), pytest.raises(OSError, match="too large") as full:
        journal.flush()
    assert full.value.errno == errno.EFBIG
    journal.flush()  # there is room again: nothing was lost, nothing is there twice
    journal.close()
    again = file_journal(tmp_path)
    assert read(again) == [b"fits", b"x" * 1000]
    again.close()


def test_with_fsync_a_power_failure_takes_nothing_that_was_flushed(disk: Disk) -> None:
    """Whether or not the new file's name has reached the disk by then."""

    def left() -> list[list[bytes]]:
        found = []
        for folder in disk.after_failures():
            again = file_journal(folder)
            found.append(read(again))
            again.close()
        return found

    journal = FileJournal(disk.folder, "it", fsync=True)
    assert left() == 2 * [[]]
    assert read(journal) == []
    write(journal, [b"flushed"])
    assert left() == 2 * [[b"flushed"]]
    journal.compact([b"snapshot", b"x" * (1 << 20), b"more"])
    assert left() == 2 * [[b"snapshot", b"x" * (1 << 20), b"more"]]
    write(journal, [b"new"])
    assert left() == 2 * [[b"snapshot", b"x" * (1 << 20), b"more", b"new"]]
    journal.close()


def test_with_fsync_the_old_journal_is_replaced_only_by_one_that_is_on_the_disk(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = FileJournal(disk.folder, "it", fsync=True)
    assert read(journal) == []
    write(journal, [b"old"])
    replace, left = os.replace, []

    def replaced(old: Path, new: Path) -> None:
        replace(old, new)
        left.append(file_journal(disk.after_failure(names_of_now=True)))

    monkeypatch.setattr(os, "replace", replaced)
    journal.compact([b"snapshot"])
    monkeypatch.undo()
    (after,) = left
    assert read(after) == [b"snapshot"]
    after.close()
    journal.close()


# ---------------------------------------------------------------------- Redis


def test_a_new_broker_takes_the_run_over_and_the_old_one_can_write_no_more(redis_server: RedisServer) -> None:
    old = RedisJournal(RedisRun(redis_server.url, "it"))
    read(old)
    write(old, [b"old"])
    new = RedisJournal(RedisRun(redis_server.url, "it"))
    with pytest.raises(
        JournalError, match=r"broker 2 has taken run it over at redis://.*; this one was broker 1"
    ):
        write(old, [b"too late"])
    with pytest.raises(JournalError, match="has taken run it over"):
        old.compact([b"too late"])
    assert read(new) == [b"old"]
    write(new, [b"new"])
    assert read(RedisJournal(RedisRun(redis_server.url, "it"))) == [b"old", b"new"]


def test_runs_do_not_meet(redis_server: RedisServer) -> None:
    one, two = (RedisJournal(RedisRun(redis_server.url, name)) for name in ("one", "two"))
    read(one), read(two)
    write(one, [b"1"])
    write(two, [b"2"])
    assert read(RedisJournal(RedisRun(redis_server.url, "one"))) == [b"1"]


def test_a_batch_that_is_sent_twice_is_kept_once(redis_server: RedisServer) -> None:
    """The answer to the first was lost with the connection."""
    journal = RedisJournal(RedisRun(redis_server.url, "it"))
    read(journal)
    write(journal, [b"once"])
    journal._length -= 1
    write(journal, [b"once"])
    assert read(RedisJournal(RedisRun(redis_server.url, "it"))) == [b"once"]


def test_a_server_that_comes_back_with_its_data_is_waited_for(own_redis: RedisServer) -> None:
    journal = RedisJournal(RedisRun(own_redis.url, "it"))
    read(journal)
    write(journal, [b"before"])
    own_redis.kill()
    own_redis.start()
    write(journal, [b"after"])
    assert read(RedisJournal(RedisRun(own_redis.url, "it"))) == [b"before", b"after"]


async def test_a_broker_says_that_it_waits_for_its_server(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    journal = RedisJournal(RedisRun(own_redis.url, "it"))
    read(journal)
    own_redis.kill()
    writing = asyncio.create_task(asyncio.to_thread(write, journal, [b"after"]))
    first, *_ = await eventually(lambda: caplog.messages)
    assert re.match(r"waiting for Redis at redis://127.*, 30 s at most: .*refused", first)
    assert not writing.done()
    await asyncio.to_thread(own_redis.start)
    await writing
    assert caplog.messages[1:] == [f"Redis at {own_redis.url} answers again"]


def test_a_server_that_comes_back_empty_is_an_error(redis_server: RedisServer) -> None:
    journal = RedisJournal(RedisRun(redis_server.url, "it"))
    read(journal)
    write(journal, [b"before"])
    redis_server.client.flushall()
    with pytest.raises(JournalError, match="has lost what this broker wrote"):
        write(journal, [b"after"])


def test_a_server_that_does_not_come_back_is_named_at_the_deadline(own_redis: RedisServer) -> None:
    journal = RedisJournal(RedisRun(own_redis.url, "it", deadline_s=0.3))
    read(journal)
    own_redis.kill()
    with pytest.raises(DeadlineError, match=r"the queue of run it waited 0\.3 s for Redis at redis://127"):
        write(journal, [b"lost"])


def test_a_server_without_memory_is_named(redis_server: RedisServer) -> None:
    journal = RedisJournal(RedisRun(redis_server.url, "it"))
    read(journal)
    redis_server.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(JournalError, match=r"will not write: .*maxmemory"):
            write(journal, [b"no room"])
    finally:
        redis_server.client.config_set("maxmemory", 0)


def test_a_server_that_may_evict_keys_is_refused(redis_server: RedisServer) -> None:
    redis_server.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ConfigError, match="may throw keys away"):
            RedisRun(redis_server.url, "it")
    finally:
        redis_server.client.config_set("maxmemory-policy", "noeviction")


def test_a_server_with_less_room_than_the_queue_may_need_is_refused(redis_server: RedisServer) -> None:
    """Only where it holds payloads: the journal is small."""
    kept = QueueConfig(store="redis", durable="payload", redis_url=redis_server.url, max_bytes=1 << 27)
    redis_server.client.config_set("maxmemory", (1 << 27) - 1)
    try:
        with pytest.raises(
            ConfigError, match=r"takes 134217727 bytes at most \(maxmemory\), and queue.max_bytes is"
        ):
            open_recovery(kept, "it", Path("nowhere"), now=0.0)
        RedisRun(redis_server.url, "it")
        for most in (1 << 27, 0):  # as much as the queue may need; without a limit
            redis_server.client.config_set("maxmemory", most)
            open_recovery(kept, "it", Path("nowhere"), now=0.0).close()
    finally:
        redis_server.client.config_set("maxmemory", 0)


def test_a_password_works_and_is_never_shown(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    own_redis.client.config_set("requirepass", "open sesame")
    url = own_redis.url.replace("redis://", "redis://:open%20sesame@")
    read(RedisJournal(RedisRun(url, "it")))
    monkeypatch.setenv("ASYNCRL_REDIS_PASSWORD", "open sesame")
    RedisRun(own_redis.url, "it").close()
    monkeypatch.delenv("ASYNCRL_REDIS_PASSWORD")
    wrong = own_redis.url.replace("redis://", "redis://:guess@")
    for bad in (own_redis.url, wrong):
        with pytest.raises(ConfigError, match="refuses these credentials") as refused:
            RedisRun(bad, "it")
        assert "guess" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"queue\.redis_url"):
        RedisRun("http://127.0.0.1", "it")


def test_an_encrypted_connection(own_redis: RedisServer, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    files = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*words, *files], check=True, capture_output=True)
    tls = free_port()
    own_redis.client.config_set("tls-key-file", str(key), "tls-cert-file", str(certificate))
    own_redis.client.config_set(
        "tls-ca-cert-file", str(certificate), "tls-auth-clients", "no", "tls-port", tls
    )
    url = f"rediss://localhost:{tls}/0"
    journal = RedisJournal(RedisRun(f"{url}?ssl_ca_certs={certificate}", "it"))
    read(journal)
    write(journal, [b"secret"])
    with pytest.raises(DeadlineError, match="certificate verify failed"):
        RedisRun(url, "it", deadline_s=0.0)


def test_a_server_on_a_socket_of_this_machine(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--unixsocket", str(tmp_path / "socket"))
    try:
        journal = RedisJournal(RedisRun(f"unix://{tmp_path}/socket", "it"))
        read(journal)
        write(journal, [b"here"])
        assert server.client.llen("asyncrl:{it}:journal") == 2
    finally:
        server.kill()


def test_the_redis_journal_of_another_version_is_refused(redis_server: RedisServer) -> None:
    read(RedisJournal(RedisRun(redis_server.url, "it")))
    with pytest.raises(JournalError, match="another version"):
        read(RedisJournal(RedisRun(redis_server.url, "it"), schema="Leased(ordinal)"))


@pytest.mark.parametrize("header", [b"x", b"\xc1", b"\x81\xa1a\x00"])
def test_a_redis_journal_that_begins_with_anything_else_is_refused(
    header: bytes, redis_server: RedisServer
) -> None:
    redis_server.client.rpush("asyncrl:{it}:journal", header)
    with pytest.raises(
        JournalError, match=r"journal of run it at redis://.* is no header. Remedy: choose another"
    ):
        read(RedisJournal(RedisRun(redis_server.url, "it")))
