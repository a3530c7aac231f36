"""One run's place in Redis, and the right to write there.

    asyncrl:{run}:broker        epoch of the broker that has the run; a new one takes it over with a higher number
    asyncrl:{run}:journal       redis_journal.py
    asyncrl:{run}:index, …      redis_payloads.py

Every write that counts goes through a script that compares the epoch first, so that a broker which was taken for dead
can write no more. A command whose answer was lost is sent again: every script does its work once, however often it
comes. So it may also come to the next primary, after a failover, whether or not the last one had passed it on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import redis
from redis.client import Pipeline

from asyncrl.errors import ConfigError, JournalError
from asyncrl.system.redis_place import DEADLINE_S, RedisPlace

KEY = "queue.redis_url"

RedisScript = Callable[..., Any]
"""(keys, arguments, pipeline or None) -> the answer."""

GUARD = """
local epoch = redis.call('get', KEYS[1])
if not epoch then return redis.error_reply('LOST') end
if epoch ~= ARGV[1] then return redis.error_reply('TAKEN ' .. epoch) end
"""
"""First lines of every script: KEYS[1] is the fence, ARGV[1] the writer's epoch."""


class RedisRun:
    """A connection that has taken the run over.

    room: bytes that the run may keep there

    ConfigError (key queue.redis_url) for a bad URL, a server that may evict keys or one whose limit is below `room`,
    DeadlineError if there is no server.
    """

    def __init__(self, url: str, run: str, *, room: int = 0, deadline_s: float = DEADLINE_S) -> None:
        self._place = RedisPlace(url, who=f"the queue of run {run}", key=KEY, deadline_s=deadline_s)
        self.run, self.where, self.client = run, self._place.where, self._place.client
        self._check_memory(room)
        self.epoch = int(self.pipeline(lambda pipeline: pipeline.incr(self.key("broker")))[0])

    def key(self, *words: str) -> str:
        """The braces keep all keys of a run on one node of a cluster."""
        return ":".join((f"asyncrl:{{{self.run}}}", *words))

    def script(self, text: str) -> RedisScript:
        """A script behind the guard. Inside a pipeline it is only queued; alone it is tried until it is answered."""
        script: Any = self.client.register_script(GUARD + text)

        def run(keys: list[str], args: list[Any], pipeline: Pipeline | None = None) -> Any:
            every = {"keys": [self.key("broker"), *keys], "args": [self.epoch, *args]}
            if pipeline is not None:
                return script(client=pipeline, **every)
            if self._place.replicas:
                return self.pipeline(lambda alone: script(client=alone, **every))[0]
            return self.call(lambda: script(**every))  # a pipeline looks for the script first: twice the time

        return run

    def call(self, command: Callable[[], Any]) -> Any:
        """The result of `command`, repeated while the server cannot be reached.

        DeadlineError after `deadline_s`; JournalError if another broker has the run, or the server has no memory.
        """
        try:
            return self._place.call(command)
        except redis.ResponseError as error:
            raise self._named(error) from error

    def pipeline(self, fill: Callable[[Pipeline], object]) -> list[Any]:
        """The answers to the commands that `fill` puts into a pipeline; it may be called again."""
        return list(self.call(partial(self._place.written, fill)))

    def close(self) -> None:
        """Idempotent."""
        self._place.close()

    def _check_memory(self, room: int) -> None:
        memory = self.call(lambda: self.client.info("memory"))
        policy, most = memory.get("maxmemory_policy", "noeviction"), memory.get("maxmemory", 0)
        if policy != "noeviction":
            rule = f"this server may throw keys away (maxmemory-policy {policy})"
            remedy = "CONFIG SET maxmemory-policy noeviction, or use another server"
            raise ConfigError(KEY, self.where, rule, remedy)
        if 0 < most < room:
            rule = f"this server takes {most} bytes at most (maxmemory), and queue.max_bytes is {room}"
            remedy = f"CONFIG SET maxmemory 0, or set queue.max_bytes below {most}"
            raise ConfigError(KEY, self.where, rule, remedy)

    def _named(self, error: redis.ResponseError) -> JournalError | ConfigError:
        text = str(error)
        if "TAKEN" in text:
            newer = text.rpartition(" ")[2]
            return JournalError(
                f"broker {newer} has taken run {self.run} over at {self.where}; this one was broker {self.epoch}"
            )
        if "LOST" in text:
            return JournalError(
                f"Redis at {self.where} has lost what this broker wrote; was it started again without appendonly?"
            )
        if isinstance(error, redis.exceptions.NoPermissionError) or "NOAUTH" in text:
            return self._place.refused(error)
        return JournalError(f"Redis at {self.where} will not write: {text}")
