"""Stored versions in Redis, in chunks, because one value holds 512 MB at most.

    asyncrl:{run}:weights                       key of the blob -> [name, bytes]
    asyncrl:{run}:weights:<name>:<chunk>        CHUNK bytes each, the last one fewer

A blob is there once the hash names it, which happens after its chunks are written; each blob has a name that is used
once. Blobs that a run leaves behind expire.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import msgpack
import redis
from redis.client import Pipeline

from asyncrl.errors import WeightSyncError
from asyncrl.sync.store.blobs import Bytes, checked_key, ends_early, missing
from asyncrl.system.redis_place import DEADLINE_S, RedisPlace

CHUNK = 64 << 20
"""Bytes."""

EXPIRES_S = 24 * 3600
"""Life of a version, from when it was written; of the newest one too, so a learner must publish once a day."""

CONFIG_KEY = "sync.redis_url"


class RedisBlobs:
    """One connection, made with the first command. ConfigError (key sync.redis_url) for a bad URL."""

    def __init__(self, url: str, run: str, *, chunk: int = CHUNK, deadline_s: float = DEADLINE_S) -> None:
        who = f"the weight stream of run {run}"
        self._place = RedisPlace(url, who=who, key=CONFIG_KEY, deadline_s=deadline_s)
        self.where, self._client = self._place.where, self._place.client
        self._index, self._chunk = f"asyncrl:{{{run}}}:weights", chunk

    def put(self, key: str, parts: Iterable[Bytes]) -> None:
        name, size, count = secrets.token_hex(8), 0, 0
        older = self._entry(key)
        try:
            for chunk in _chunks(parts, self._chunk):
                place = self._chunk_key(name, count)
                self._write(partial(_set, place, memoryview(chunk)))
                size, count = size + len(chunk), count + 1
            entry = msgpack.packb([name, size])
            self._write(lambda pipeline: pipeline.hset(self._index, key, entry))
        except BaseException:
            self._unlink(name, count)
            raise
        self._call(lambda: self._client.expire(self._index, EXPIRES_S))
        if older is not None:
            self._unlink(older[0], self._count(older[1]))

    def get(self, key: str) -> bytes:
        entry = self._found(key)
        data = bytearray(entry[1])
        self._read(key, entry, 0, memoryview(data))
        return bytes(data)

    def read(self, key: str, start: int, into: memoryview) -> None:
        self._read(key, self._found(key), start, into)

    def list(self, prefix: str) -> list[str]:
        below = f"{checked_key(prefix)}/".encode()
        keys = self._call(lambda: self._client.hkeys(self._index))
        return [key.decode() for key in keys if key.startswith(below)]

    def delete(self, key: str) -> None:
        entry = self._entry(key)
        if entry is not None:
            self._call(lambda: self._client.hdel(self._index, key))
            self._unlink(entry[0], self._count(entry[1]))

    def sweep(self, folder: str, kept: str) -> None:
        for key in self.list(folder):
            if not key.startswith(f"{kept}/"):
                self.delete(key)

    def close(self) -> None:
        self._place.close()

    def _read(self, key: str, entry: tuple[str, int], start: int, into: memoryview) -> None:
        name, size = entry
        if start + len(into) > size:
            raise ends_early(key, self.where, start + len(into), size)
        filled = 0
        while filled < len(into):
            number, at = divmod(start + filled, self._chunk)
            count = min(self._chunk - at, len(into) - filled)
            place = self._chunk_key(name, number)
            data = self._call(partial(self._client.getrange, place, at, at + count - 1))
            if len(data) != count:
                raise missing(key, self.where)  # deleted, or expired, since its entry was read
            into[filled : filled + count] = data
            filled += count

    def _found(self, key: str) -> tuple[str, int]:
        entry = self._entry(key)
        if entry is None:
            raise missing(key, self.where)
        return entry

    def _entry(self, key: str) -> tuple[str, int] | None:
        checked_key(key)
        packed = self._call(lambda: self._client.hget(self._index, key))
        if packed is None:
            return None
        try:
            name, size = msgpack.unpackb(packed)
            return str(name), int(size)
        except Exception as error:
            raise WeightSyncError(f"stored weights: the entry of {key} at {self.where}: {error!r}") from error

    def _unlink(self, name: str, chunks: int) -> None:
        keys = [self._chunk_key(name, number) for number in range(chunks)]
        if keys:
            self._call(lambda: self._client.unlink(*keys))

    def _count(self, size: int) -> int:
        return -(-size // self._chunk)

    def _chunk_key(self, name: str, number: int) -> str:
        return f"{self._index}:{name}:{number}"

    def _write(self, fill: Callable[[Pipeline], object]) -> None:
        self._call(partial(self._place.written, fill))

    def _call(self, command: Callable[[], Any]) -> Any:
        try:
            return self._place.call(command)
        except redis.exceptions.NoPermissionError as error:
            raise self._place.refused(error) from error
        except redis.ResponseError as error:
            raise WeightSyncError(f"stored weights: Redis at {self.where} refuses: {error}") from error


def _set(place: str, chunk: memoryview, pipeline: Pipeline) -> None:
    pipeline.set(place, chunk, ex=EXPIRES_S)


def _chunks(parts: Iterable[Bytes], size: int) -> Iterator[bytearray]:
    """The same bytes, cut anew."""
    chunk = bytearray()
    for part in parts:
        rest = memoryview(part).cast("B")
        while len(rest):
            room = size - len(chunk)
            chunk += rest[:room]
            rest = rest[room:]
            if len(chunk) == size:
                yield chunk
                chunk = bytearray()
    if chunk:
        yield chunk
