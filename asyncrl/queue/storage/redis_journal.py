"""The journal in Redis: a list with one element per flush, the first of them the header.

    asyncrl:{run}:journal         header · batch · batch · …
    asyncrl:{run}:journal:new     a snapshot that is being written, until it takes the journal's name

A batch carries the length that the list must have, so that one which is sent twice is kept once, and one that follows
a loss is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from asyncrl.queue.storage.journal import LEAST_OVERGROWN, Growth, Header, batches, join, split
from asyncrl.queue.storage.redis_run import RedisRun

READ_AT_ONCE = 64

PUSH = """
local length = redis.call('llen', KEYS[2])
if length == tonumber(ARGV[2]) then return redis.call('rpush', KEYS[2], ARGV[3]) end
if length == tonumber(ARGV[2]) + 1 then return length end
return redis.error_reply('LOST')
"""
"""A batch behind ARGV[2] others. One more than that: it was sent before."""

CLEAR = "return redis.call('del', KEYS[2])"

TAKE_PLACE = """
if redis.call('exists', KEYS[3]) == 1 then redis.call('rename', KEYS[3], KEYS[2]) end
if redis.call('llen', KEYS[2]) == tonumber(ARGV[2]) then return 1 end
return redis.error_reply('LOST')
"""


class RedisJournal:
    """schema, before, least_overgrown: as in FileJournal. The server's `appendonly` decides how durable a flush is."""

    def __init__(
        self,
        run: RedisRun,
        schema: str = "",
        before: str | None = None,
        *,
        least_overgrown: int = LEAST_OVERGROWN,
    ) -> None:
        self._run, self._key, self._new = run, run.key("journal"), run.key("journal", "new")
        self._header = Header(run.run, schema, before)
        self.outdated = False
        self._push, self._clear = run.script(PUSH), run.script(CLEAR)
        self._take_place = run.script(TAKE_PLACE)
        self._growth = Growth(least_overgrown)
        self._buffer: list[bytes] = []
        self._length = 0

    def replay(self) -> Iterator[bytes]:
        at = 0
        while found := self._read(at, at + READ_AT_ONCE - 1):
            if at == 0:
                self._check(found.pop(0))
                at = 1
            for batch in found:
                self._growth.add(len(batch))
                yield from split(batch)
            at += len(found)
        self._length = at
        if at == 0:
            self._write(self._key, self._header.packed)

    def append(self, record: bytes) -> None:
        self._buffer.append(record)

    def flush(self) -> None:
        if self._buffer:
            self._write(self._key, join(self._buffer))
            self._buffer = []

    def compact(self, records: Iterable[bytes]) -> None:
        self._buffer = []
        self._clear([self._new], [])
        self._length = 0
        self._growth.snapshot(0)
        for batch in (self._header.packed, *batches(records)):
            self._write(self._new, batch)
        self._take_place([self._key, self._new], [self._length])
        self.outdated = False
        self._growth.snapshot(self._growth.size)

    @property
    def overgrown(self) -> bool:
        return self._growth.over

    def close(self) -> None:
        self.flush()

    def _write(self, key: str, batch: bytes) -> None:
        self._push([key], [self._length, batch])
        self._length += 1
        self._growth.add(len(batch))

    def _read(self, first: int, last: int) -> list[bytes]:
        return self._run.call(lambda: list(self._run.client.lrange(self._key, first, last)))

    def _check(self, header: bytes) -> None:
        where = f"the journal of run {self._run.run} at {self._run.where}"
        self.outdated = self._header.is_before(header, where, "choose another run.name")
