"""One suite over every `Blobs`: a folder and Redis."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from redis_server import RedisServer

from asyncrl.config.schema import Config, SyncConfig
from asyncrl.errors import ConfigError, DeadlineError, WeightSyncError, WireError
from asyncrl.sync.factory import open_blobs
from asyncrl.sync.store.blobs import Blobs, FolderBlobs, MissingBlobError
from asyncrl.sync.store.redis_blobs import EXPIRES_S, RedisBlobs

KEY = "rank-00000/0-ab/00000001.manifest"


@pytest.fixture(params=["folder", "folder, fsync", "redis"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Blobs]:
    if request.param == "redis":
        made: Blobs = RedisBlobs(request.getfixturevalue("redis_server").url, "it", chunk=10)
    else:
        made = FolderBlobs(tmp_path / "it", fsync=request.param == "folder, fsync")
    yield made
    made.close()


def read(blobs: Blobs, key: str, start: int, size: int) -> bytes:
    into = bytearray(size)
    blobs.read(key, start, memoryview(into))
    return bytes(into)


def test_what_was_put_is_read_whole_and_by_ranges(blobs: Blobs) -> None:
    data = bytes(range(45))
    blobs.put(KEY, [data[:3], memoryview(data)[3:40], b"", data[40:]])
    assert blobs.get(KEY) == data
    for start, size in ((0, 45), (0, 1), (9, 2), (10, 10), (7, 30), (44, 1), (45, 0)):
        assert read(blobs, KEY, start, size) == data[start : start + size]


def test_another_put_replaces_it_and_an_empty_one_is_one(blobs: Blobs) -> None:
    blobs.put(KEY, [b"x" * 45])
    blobs.put(KEY, [b"short"])
    assert blobs.get(KEY) == b"short"
    blobs.put(KEY, [])
    assert blobs.get(KEY) == b""


def test_keys_are_listed_below_whole_words(blobs: Blobs) -> None:
    assert blobs.list("a/b") == []
    for key in ("a/b/1", "a/bc/1", "a/b/2.x"):
        blobs.put(key, [b"1"])
    assert sorted(blobs.list("a/b")) == ["a/b/1", "a/b/2.x"]
    blobs.delete("a/b/1")
    blobs.delete("a/b/1")
    assert blobs.list("a/b") == ["a/b/2.x"]
    blobs.delete("a/b/2.x")
    blobs.put("a/b/3", [b"1"])
    assert blobs.list("a/b") == ["a/b/3"]


def test_what_is_not_there_or_too_short_is_named(blobs: Blobs) -> None:
    for look in (lambda: blobs.get("a/none"), lambda: read(blobs, "a/none", 0, 1)):
        with pytest.raises(MissingBlobError, match=f"there is no a/none at {blobs.where}"):
            look()
    blobs.put(KEY, [b"12345"])
    with pytest.raises(WeightSyncError, match=f"{KEY} at .* is torn: 5 bytes, not the 7 it should have"):
        read(blobs, KEY, 3, 4)


def test_a_writer_that_fails_leaves_the_older_blob(blobs: Blobs) -> None:
    def half() -> Iterator[bytes]:
        yield b"x" * 25
        raise RuntimeError("taken back")

    blobs.put(KEY, [b"older"])
    for key in (KEY, "a/new"):
        with pytest.raises(RuntimeError, match="taken back"):
            blobs.put(key, half())
    assert blobs.get(KEY) == b"older"
    assert blobs.list("a") == []


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/.hidden", "a b"])
def test_a_key_is_plain_words(key: str, blobs: Blobs) -> None:
    for use in (blobs.get, blobs.list, lambda key: blobs.put(key, [b"1"])):
        with pytest.raises(WireError, match="not a key of stored weights"):
            use(key)


def test_a_folder_has_no_unfinished_files_and_lists_none(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".1.manifest.00ff").write_bytes(b"from a writer that was killed")
    blobs.put("a/1.manifest", [b"1"])
    assert blobs.list("a") == ["a/1.manifest"]
    assert len(os.listdir(tmp_path / "a")) == 2


def test_sweeping_leaves_what_is_kept_and_other_folders(blobs: Blobs) -> None:
    for key in ("a/1/x", "a/1/y", "a/2/x", "a/22/x", "b/1/x"):
        blobs.put(key, [b"1"])
    blobs.sweep("a", "a/2")
    assert (blobs.list("a"), blobs.list("b")) == (["a/2/x"], ["b/1/x"])
    blobs.sweep("nothing", "nothing/here")


def test_files_of_a_killed_writer_go_with_the_next_sweep(tmp_path: Path) -> None:
    """Also where it was killed at its first blob, so that there is none to delete."""
    (tmp_path / "a" / "1").mkdir(parents=True)
    (tmp_path / "a" / "1" / ".0.tensors.00ff").write_bytes(b"as large as all weights")
    blobs = FolderBlobs(tmp_path)
    blobs.put("a/2/0.manifest", [b"1"])
    blobs.sweep("a", "a/2")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "a",
        "a/2",
        "a/2/0.manifest",
    ]


def test_a_full_disk_is_an_os_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        FolderBlobs(tmp_path, fsync=True).put("a/1", [b"1"])
    assert os.listdir(tmp_path / "a") == []


def fails(_: int) -> None:
    raise OSError(28, "No space left on device")


def test_what_replaces_or_deletes_in_redis_leaves_no_chunks_and_all_expire(redis_server: RedisServer) -> None:
    blobs, client = RedisBlobs(redis_server.url, "it", chunk=10), redis_server.client
    blobs.put(KEY, [b"x" * 45])
    assert len(client.keys()) == 1 + 5
    assert all(0 < client.ttl(key) <= EXPIRES_S for key in client.scan_iter())
    blobs.put(KEY, [b"x" * 11])
    assert len(client.keys()) == 1 + 2
    blobs.delete(KEY)
    assert client.keys() == []


def test_a_chunk_that_expired_is_a_missing_blob_and_a_damaged_entry_is_named(
    redis_server: RedisServer,
) -> None:
    blobs, client = RedisBlobs(redis_server.url, "it", chunk=10), redis_server.client
    blobs.put(KEY, [b"x" * 45])
    client.delete(*client.keys("*:3"))
    assert read(blobs, KEY, 0, 30) == b"x" * 30
    with pytest.raises(MissingBlobError):
        read(blobs, KEY, 25, 10)
    client.hset("asyncrl:{it}:weights", KEY, msgpack.packb(7))
    with pytest.raises(WeightSyncError, match=f"the entry of {KEY}"):
        blobs.get(KEY)


def test_runs_in_one_redis_do_not_see_each_other(redis_server: RedisServer) -> None:
    RedisBlobs(redis_server.url, "it").put(KEY, [b"1"])
    assert RedisBlobs(redis_server.url, "other").list("rank-00000") == []


def test_a_redis_that_is_not_there_is_named_at_the_deadline_and_without_password() -> None:
    blobs = RedisBlobs("redis://me:secret@127.0.0.1:9/0", "it", deadline_s=0.2)
    with pytest.raises(
        DeadlineError, match=r"weight stream of run it waited 0.2 s for Redis at redis://me:\*\*\*@"
    ):
        blobs.get(KEY)
    with pytest.raises(ConfigError, match=r"sync\.redis_url"):
        RedisBlobs("nonsense://x", "it")


def test_the_config_says_where(tmp_path: Path, redis_server: RedisServer) -> None:
    folder = open_blobs(SyncConfig(backend="file", folder=str(tmp_path)), "it")
    folder.put(KEY, [b"1"])
    assert (tmp_path / "it" / KEY).read_bytes() == b"1"
    assert isinstance(open_blobs(SyncConfig(backend="redis", redis_url=redis_server.url), "it"), RedisBlobs)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"backend": "file"}, "sync.folder"),
        ({"folder": "/x"}, "sync.folder"),
        ({"backend": "redis"}, "sync.redis_url"),
        ({"backend": "file", "folder": "/x", "redis_url": "redis://x"}, "sync.redis_url"),
        ({"keep": 0}, "sync.keep"),
    ],
)
def test_a_place_goes_with_its_backend(fields: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        Config(sync=SyncConfig(**fields))
