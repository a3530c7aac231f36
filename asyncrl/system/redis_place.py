"""Reaching a Redis server: by its URL, with the password from the environment, patiently, and named in errors without
the password."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from asyncrl.errors import ConfigError, DeadlineError
from asyncrl.masking import masked_url

log = logging.getLogger(__name__)

DEADLINE_S = 30.0
"""Seconds for which a lost connection is tried again; less than a client waits for its answer."""

PASSWORD = "ASYNCRL_REDIS_PASSWORD"
"""Environment variable with the password, for a URL without one: config.yaml lies in the run folder for all to read."""

REMEDY = "write e.g. {key}=redis://127.0.0.1:6379/0; in a password write %2F for /, %40 for @, %3A for :"

PAUSE_S = 0.1
ATTEMPT_S = 10.0
"""Longest silence of one attempt."""

UNREACHABLE = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.ReadOnlyError)
"""Errors that may pass: not there, not there yet (loading), a replica that is about to be promoted."""


def open_redis(url: str, key: str) -> redis.Redis:
    """A client; it connects with its first command. key: the config key of `url`, for the ConfigError of a bad one."""
    try:
        return redis.Redis.from_url(
            url,
            password=os.environ.get(PASSWORD),
            socket_timeout=ATTEMPT_S,
            socket_connect_timeout=ATTEMPT_S,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError:  # its text may hold a part of the password
        raise ConfigError(
            key, masked_url(url), "is no URL of a Redis server", REMEDY.format(key=key)
        ) from None


def patiently(command: Callable[[], Any], *, who: str, where: str, key: str, deadline_s: float) -> Any:
    """The result of `command`, tried again while the server at `where` cannot be reached.

    DeadlineError after `deadline_s`, ConfigError (of `key`) for credentials that the server refuses.
    """
    until = time.monotonic() + deadline_s
    waits = False
    while True:
        try:
            found = command()
        except UNREACHABLE as error:
            if isinstance(error, redis.AuthenticationError):
                raise refused(error, where, key) from error
            if time.monotonic() >= until:
                whom = f"Redis at {where} ({type(error).__name__}: {error})"
                raise DeadlineError(who, whom, "an answer", deadline_s) from error
            if not waits:
                log.warning("waiting for Redis at %s, %.0f s at most: %s", where, deadline_s, error)
                waits = True
            time.sleep(PAUSE_S)
        else:
            if waits:
                log.warning("Redis at %s answers again", where)
            return found


def refused(error: redis.RedisError, where: str, key: str) -> ConfigError:
    """The error for a server that refuses the name and password."""
    return ConfigError(
        key,
        where,
        f"the server refuses these credentials: {error}",
        f"give name and password as in redis://name:password@host:6379/0, or the password in {PASSWORD}",
    )
