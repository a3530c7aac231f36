"""Reaching Redis: by its URL, with the password from the environment, patiently, and named in errors without the
password. Behind sentinels, a write counts once replicas have it, so that the next primary has it, too.

    RedisPlace.call(command)                     tried again while the server cannot be reached
    RedisPlace.call(partial(place.written, …))   the same for writes: commands · WAIT for replicas
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.retry import Retry
from redis.sentinel import Sentinel

from asyncrl.errors import ConfigError, DeadlineError
from asyncrl.masking import masked_url
from asyncrl.system.redis_url import SENTINELS, SentinelUrl, is_redis_url

log = logging.getLogger(__name__)

DEADLINE_S = 30.0
"""Seconds for which a lost connection is tried again; less than a client waits for its answer."""

PASSWORD = "ASYNCRL_REDIS_PASSWORD"
"""Environment variable with the password, for a URL without one: config.yaml lies in the run folder for all to read."""

SENTINEL_PASSWORD = "ASYNCRL_SENTINEL_PASSWORD"
"""Environment variable with the password of the sentinels, which is another one."""

REMEDY = (
    "write e.g. {key}=redis://127.0.0.1:6379/0, or redis+sentinel://HOST:26379,HOST:26379/PRIMARY/0; in a password "
    "write %2F for /, %40 for @ and %3A for :"
)

PAUSE_S = 0.1
ATTEMPT_S, SENTINEL_S = 10.0, 2.0
"""Longest silence of one attempt, and of one sentinel."""

REPLICATED_S = 5.0
"""Seconds that one attempt of a write waits for replicas; less than ATTEMPT_S."""

BARRIER, BARRIER_S = "asyncrl:barrier", 24 * 3600
"""A key that every write behind sentinels sets last: WAIT answers at once to a connection that has changed nothing, and
a script that finds its work done changes nothing. It expires."""

UNREACHABLE = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.ReadOnlyError)
"""Errors that may pass: not there, not there yet (loading), a replica that is about to be promoted."""

PASSING = ("UNBLOCKED", "NOREPLICAS")
"""Begin answers that may be others soon: a primary became a replica while somebody waited there, or lacks replicas."""


class RedisPlace:
    """A server, or the primary that sentinels name. It is reached with the first command.

    who: waits, in errors · key: the config key of `url`

    ConfigError (of `key`) for a bad URL.
    """

    def __init__(self, url: str, *, who: str, key: str, deadline_s: float = DEADLINE_S) -> None:
        self.where, self._who, self._key, self._deadline_s = masked_url(url), who, key, deadline_s
        if not is_redis_url(url):
            raise ConfigError(key, self.where, "is no URL of Redis", REMEDY.format(key=key))
        self.replicas = 0
        """How many must have a write before it counts."""
        if url.startswith(SENTINELS):
            found = SentinelUrl.of(url)
            self.replicas, self.client = found.replicas, _primary(found)
        else:
            self.client = _server(url, key)

    def call(self, command: Callable[[], Any]) -> Any:
        """The result of `command`, tried again while the server cannot be reached.

        DeadlineError after `deadline_s`, ConfigError for credentials that the server refuses.
        """
        until, waits = time.monotonic() + self._deadline_s, False
        while True:
            try:
                found = command()
            except UNREACHABLE as error:
                if isinstance(error, redis.AuthenticationError) or "AuthenticationError" in str(error):
                    raise self.refused(error) from error
                if time.monotonic() >= until:
                    whom = f"Redis at {self.where} ({type(error).__name__}: {error})"
                    raise DeadlineError(self._who, whom, "an answer", self._deadline_s) from error
                if not waits:
                    log.warning(
                        "waiting for Redis at %s, %.0f s at most: %s", self.where, self._deadline_s, error
                    )
                    waits = True
                time.sleep(PAUSE_S)
            else:
                if waits:
                    log.warning("Redis at %s answers again", self.where)
                return found

    def written(self, fill: Callable[[Pipeline], object]) -> list[Any]:
        """One attempt: the answers to the commands that `fill` puts into a pipeline, once `replicas` have them.

        An attempt that fails may have done its work, at a primary that goes on or at one that is gone.
        """
        with self.client.pipeline(transaction=False) as pipeline:
            fill(pipeline)
            if not self.replicas:
                return pipeline.execute()
            pipeline.set(BARRIER, 1, ex=BARRIER_S)
            pipeline.wait(self.replicas, round(REPLICATED_S * 1e3))
            try:
                *answers, _, having = pipeline.execute()
            except redis.ResponseError as error:
                if any(word in str(error) for word in PASSING):
                    raise redis.ConnectionError(str(error)) from error
                raise
        if having < self.replicas:
            # The next attempt asks the sentinels: this primary may have been replaced.
            self.client.connection_pool.disconnect(inuse_connections=False)
            raise redis.TimeoutError(
                f"{having} of {self.replicas} replicas have a write after {REPLICATED_S} s"
            )
        return answers

    def refused(self, error: redis.RedisError) -> ConfigError:
        """The error for a server that refuses the name and password."""
        rule = f"the server refuses these credentials: {error}"
        remedy = (
            f"give name and password as in redis://name:password@host:6379/0, or the password in {PASSWORD}"
        )
        remedy += f"; the password of sentinels in {SENTINEL_PASSWORD}" * bool(self.replicas)
        return ConfigError(self._key, self.where, rule, remedy)

    def close(self) -> None:
        """Idempotent."""
        self.client.close()


def _server(url: str, key: str) -> redis.Redis:
    try:
        return redis.Redis.from_url(url, password=os.environ.get(PASSWORD), **_patience(ATTEMPT_S))
    except ValueError:  # its text may hold a part of the password
        raise ConfigError(key, masked_url(url), "is no URL of Redis", REMEDY.format(key=key)) from None


def _primary(url: SentinelUrl) -> redis.Redis:
    """A client of the primary; each of its connections asks the sentinels who that is."""
    tls = {"ssl": url.tls, **url.tls_options}
    sentinels = Sentinel(
        url.hosts,
        sentinel_kwargs={**tls, **_patience(SENTINEL_S), "password": os.environ.get(SENTINEL_PASSWORD)},
        **{"password": os.environ.get(PASSWORD), **url.credentials},
        **{**tls, **_patience(ATTEMPT_S), "db": url.db},
    )
    return sentinels.master_for(url.primary)


def _patience(seconds: float) -> dict[str, Any]:
    return {"socket_timeout": seconds, "socket_connect_timeout": seconds, "retry": Retry(NoBackoff(), 0)}
