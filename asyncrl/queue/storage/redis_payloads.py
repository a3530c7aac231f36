"""Payloads in Redis. A payload is a hash of its frames under a name that is used once; the index has its key.

    asyncrl:{run}:payload:<epoch>-<n>     "frames" their number · "0" frame · "1" frame · …
    asyncrl:{run}:index                   key of the payload -> [name, stamp, frames, bytes]

Large frames are costly to pass through a script (half the speed and less), so they are written without the guard, into
a hash that was made to expire by itself; the guarded script that puts them into the index makes them stay. Payloads
of a broker that was taken over are in no index.

    a flush whose answer is lost    is sent again under new names; the script deletes those of before, whether or not
                                    they came to stay. No name is written twice, so that nothing in the index expires
    a takeover                      every payload of the index stays, and one that is not there leaves the index
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import msgspec
from redis.client import Pipeline

from asyncrl.errors import JournalError
from asyncrl.queue.storage.redis_run import RedisRun
from asyncrl.queue.storage.store import Frames, PayloadKey

log = logging.getLogger(__name__)

EXPIRES_S = 600
"""Life of a payload that never gets into the index. Longer than any wait for the server."""

BATCH = 64
BATCH_BYTES = 64 << 20
"""Payloads, and their bytes, in one pipeline; the server and this side hold all of it at once."""

RESERVE = """
for i, key in ipairs(KEYS) do
  redis.call('hset', key, 'frames', ARGV[1 + i])
  redis.call('expire', key, ARGV[1])
end
"""
"""KEYS: payloads to come. ARGV: their life, and their numbers of frames. Not guarded: the frames follow in any case."""

ADOPT = """
local there = {}
for i = 2, #KEYS do
  there[i - 1] = redis.call('exists', KEYS[i])
  redis.call('persist', KEYS[i])
end
return there
"""
"""KEYS: payloads. Makes them stay, and answers which of them are there."""

KEEP = """
local puts = tonumber(ARGV[2])
for i = 1, puts do
  if redis.call('exists', KEYS[2 + i]) == 0 then return redis.error_reply('LOST') end
  redis.call('persist', KEYS[2 + i])
  redis.call('hset', KEYS[2], ARGV[1 + 2 * i], ARGV[2 + 2 * i])
end
for i = puts + 3, #KEYS do redis.call('unlink', KEYS[i]) end
for i = 2 * puts + 3, #ARGV do redis.call('hdel', KEYS[2], ARGV[i]) end
return 1
"""
"""KEYS: index, payloads to keep, payloads to delete. ARGV: how many to keep, their fields and entries, fields to
delete."""


_decode_key = msgspec.msgpack.Decoder(PayloadKey).decode
_decode_entry = msgspec.msgpack.Decoder(tuple[str, int, int, int]).decode


@dataclass(frozen=True, slots=True)
class PayloadEntry:
    name: str
    stamp: int
    frames: int
    nbytes: int


class RedisPayloads:
    """Written and erased in one go by `flush`; what is read before that comes from here."""

    def __init__(self, run: RedisRun) -> None:
        self._run, self._index = run, run.key("index")
        self._keep, self._adopt = run.script(KEEP), run.script(ADOPT)
        self._reserve: Any = run.client.register_script(RESERVE)
        self._entries: dict[PayloadKey, PayloadEntry] = {}
        self._unwritten: dict[PayloadKey, Frames] = {}
        # Names of payloads in the index, or before, under this key.
        self._unerased: dict[PayloadKey, list[str]] = {}
        self._named = 0
        self._tried: list[str] = []  # names of the flush under way, of which nobody knows how far they came
        self.nbytes = 0
        found = run.call(lambda: dict(run.client.hgetall(self._index)))
        for field, packed in found.items():
            try:
                key, entry = _decode_key(field), _decode_entry(packed)
            except msgspec.MsgspecError as error:
                raise JournalError(
                    f"{self._index} at {run.where} has what no broker wrote: {error}"
                ) from error
            self._note(key, PayloadEntry(*entry))
        keys = list(self._entries)
        for at in range(0, len(keys), BATCH):
            self._adopt_some(keys[at : at + BATCH])

    def write(self, key: PayloadKey, frames: Frames, stamp: int) -> None:
        self.erase(key)
        self._unwritten[key] = frames
        self._note(key, PayloadEntry("", stamp, len(frames), sum(len(frame) for frame in frames)))

    def read(self, key: PayloadKey) -> Frames:
        entry = self._entries.get(key)
        if entry is None:
            return ()
        if key in self._unwritten:
            return self._unwritten[key]
        fields = [str(i) for i in range(entry.frames)]
        frames = self._run.call(lambda: self._run.client.hmget(self._payload(entry.name), fields))
        if None in frames:  # whoever reads the group finds out, and it is dropped
            log.error("Redis at %s has lost the payload of %s", self._run.where, key)
        return [frame or b"" for frame in frames]

    def erase(self, key: PayloadKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.nbytes -= entry.nbytes
        if self._unwritten.pop(key, None) is None:
            self._unerased.setdefault(key, []).append(entry.name)

    def flush(self) -> None:
        while self._unwritten or self._unerased:
            self._flush_some()

    def stamps(self) -> Mapping[PayloadKey, int]:
        return {key: entry.stamp for key, entry in self._entries.items()}

    def close(self) -> None:
        self.flush()

    def _adopt_some(self, keys: list[PayloadKey]) -> None:
        """Keep payloads that an earlier broker wrote."""
        there = self._adopt([self._payload(self._entries[key].name) for key in keys], [])
        for key, found in zip(keys, there, strict=True):
            if not found:
                log.error("Redis at %s has lost the payload of %s", self._run.where, key)
                self.erase(key)

    def _flush_some(self) -> None:
        """Payloads, then the script that makes them count, in one round trip."""
        written = self._next_unwritten()
        # What a payload replaces goes with it, or the index would for a while name one that is gone.
        erased = {
            key: names
            for key, names in self._unerased.items()
            if key in written or key not in self._unwritten
        }

        def fill(pipeline: Pipeline) -> None:
            before = list(self._tried)
            for key in written:
                self._rename(key)
            keys = [self._payload(self._entries[key].name) for key in written]
            if keys:
                self._reserve(keys, [EXPIRES_S, *map(len, written.values())], pipeline)
            for name, frames in zip(keys, written.values(), strict=True):
                pipeline.hset(name, mapping={str(i): memoryview(frame) for i, frame in enumerate(frames)})
            gone = [self._payload(name) for names in (*erased.values(), before) for name in names]
            entries = [part for key in written for part in self._indexed(key)]
            dropped = [_field(key) for key in erased if key not in self._entries]
            self._keep([self._index, *keys, *gone], [len(keys), *entries, *dropped], pipeline)

        self._run.pipeline(fill)
        self._tried = []
        for key in written:
            del self._unwritten[key]
        for key in erased:
            del self._unerased[key]

    def _rename(self, key: PayloadKey) -> None:
        """To a name that nobody has used."""
        self._named += 1
        self._tried.append(f"{self._run.epoch}-{self._named}")
        self._entries[key] = replace(self._entries[key], name=self._tried[-1])

    def _next_unwritten(self) -> dict[PayloadKey, Frames]:
        taken: dict[PayloadKey, Frames] = {}
        size = 0
        for key, frames in self._unwritten.items():
            size += self._entries[key].nbytes
            if taken and (size > BATCH_BYTES or len(taken) == BATCH):
                break
            taken[key] = frames
        return taken

    def _indexed(self, key: PayloadKey) -> tuple[bytes, bytes]:
        entry = self._entries[key]
        return _field(key), msgpack.packb([entry.name, entry.stamp, entry.frames, entry.nbytes])

    def _payload(self, name: str) -> str:
        return self._run.key("payload", name)

    def _note(self, key: PayloadKey, entry: PayloadEntry) -> None:
        self._entries[key] = entry
        self.nbytes += entry.nbytes


def _field(key: PayloadKey) -> bytes:
    return msgpack.packb(list(key))
