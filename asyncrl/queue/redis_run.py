"""One run's place in Redis, and the right to write there.

    asyncrl:{run}:broker        epoch of the broker that has the run; a new one takes it over with the next number
    asyncrl:{run}:journal       redis_journal.py
    asyncrl:{run}:index, …      redis_shelf.py

Every write that counts goes through a script that compares the epoch first, so that a broker which was taken for dead
can write no more. A command whose answer was lost is sent again: every script does its work once, however often it
comes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.retry import Retry

from asyncrl.errors import ConfigError, DeadlineError, JournalError

log = logging.getLogger(__name__)

DEADLINE_S = 30.0
"""How long a connection that is lost is tried again; less than a client waits for its answer."""

PASSWORD = "ASYNCRL_REDIS_PASSWORD"
"""Environment variable with the password, for a URL without one: config.yaml lies in the run folder for all to read."""

PAUSE_S = 0.1
ATTEMPT_S = 10.0
"""Longest silence of one attempt."""

GUARD = """
local epoch = redis.call('get', KEYS[1])
if not epoch then return redis.error_reply('LOST') end
if epoch ~= ARGV[1] then return redis.error_reply('TAKEN ' .. epoch) end
"""
"""First lines of every script: KEYS[1] is the fence, ARGV[1] the writer's epoch."""

UNREACHABLE = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.ReadOnlyError)
"""What may go over: not there, not there yet (loading), a replica that is about to be promoted."""


class RedisRun:
    """A connection that has taken the run over.

    ConfigError (key queue.redis_url) for a bad URL or a server that may evict keys, DeadlineError if there is no
    server.
    """

    def __init__(self, url: str, run: str, *, deadline_s: float = DEADLINE_S) -> None:
        self.run, self.where, self._deadline_s = run, without_password(url), deadline_s
        try:
            self.client = redis.Redis.from_url(
                url,
                password=os.environ.get(PASSWORD),
                socket_timeout=ATTEMPT_S,
                socket_connect_timeout=ATTEMPT_S,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise ConfigError(
                "queue.redis_url", self.where, str(error), "e.g. queue.redis_url=redis://127.0.0.1:6379/0"
            ) from error
        self._refuse_eviction()
        self.epoch: int = self.call(lambda: self.client.incr(self.key("broker")))

    def key(self, *words: str) -> str:
        """The braces keep all keys of a run on one node of a cluster."""
        return ":".join((f"asyncrl:{{{self.run}}}", *words))

    def script(self, text: str) -> Script:
        return Script(self, self.client.register_script(GUARD + text))

    def call(self, command: Callable[[], Any]) -> Any:
        """What `command` returns, tried again while the server cannot be reached.

        DeadlineError after `deadline_s`; JournalError if another broker has the run, or the server has no memory.
        """
        until = time.monotonic() + self._deadline_s
        waits = False
        while True:
            try:
                found = command()
            except UNREACHABLE as error:
                if isinstance(error, redis.AuthenticationError):
                    raise self._refused(error) from error
                if time.monotonic() >= until:
                    who = f"the queue of run {self.run}"
                    whom = f"Redis at {self.where} ({type(error).__name__}: {error})"
                    raise DeadlineError(who, whom, "an answer", self._deadline_s) from error
                if not waits:
                    log.warning(
                        "waiting for Redis at %s, %.0f s at most: %s", self.where, self._deadline_s, error
                    )
                    waits = True
                time.sleep(PAUSE_S)
            except redis.ResponseError as error:
                raise self._named(error) from error
            else:
                if waits:
                    log.warning("Redis at %s answers again", self.where)
                return found

    def pipeline(self, fill: Callable[[Pipeline], None]) -> list[Any]:
        """The answers to the commands that `fill` puts into a pipeline; it may be asked to do so again."""

        def run() -> list[Any]:
            with self.client.pipeline(transaction=False) as pipeline:
                fill(pipeline)
                return pipeline.execute()

        return self.call(run)

    def close(self) -> None:
        """Again: nothing."""
        self.client.close()

    def _refuse_eviction(self) -> None:
        policy = self.call(lambda: self.client.info("memory")).get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise ConfigError(
                "queue.redis_url",
                self.where,
                f"this server may throw keys away (maxmemory-policy {policy})",
                "CONFIG SET maxmemory-policy noeviction, or use another server",
            )

    def _refused(self, error: redis.RedisError) -> ConfigError:
        return ConfigError(
            "queue.redis_url",
            self.where,
            f"the server refuses these credentials: {error}",
            f"give name and password as in redis://name:password@host:6379/0, or the password in {PASSWORD}",
        )

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
            return self._refused(error)
        return JournalError(f"Redis at {self.where} will not write: {text}")


class Script:
    """A script behind the guard."""

    def __init__(self, run: RedisRun, script: Any) -> None:
        self._run, self._script = run, script

    def __call__(self, keys: list[str], args: list[Any], pipeline: Pipeline | None = None) -> Any:
        """Inside a pipeline it is only queued; alone it is tried until it is answered."""
        every = {"keys": [self._run.key("broker"), *keys], "args": [self._run.epoch, *args]}
        if pipeline is not None:
            return self._script(client=pipeline, **every)
        return self._run.call(lambda: self._script(**every))


def without_password(url: str) -> str:
    """
    >>> without_password("rediss://me:secret@host:6380/2")
    'rediss://me:***@host:6380/2'
    """
    parts = urlsplit(url)
    if parts.password is None:
        return url
    name, _, place = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{name.partition(':')[0]}:***@{place}"))
