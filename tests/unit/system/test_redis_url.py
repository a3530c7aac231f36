"""URLs of Redis: all parts of one with sentinels, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from redis.client import Pipeline

from asyncrl.errors import ConfigError
from asyncrl.masking import masked_url
from asyncrl.system.redis_place import RedisPlace
from asyncrl.system.redis_url import SentinelUrl, is_redis_url

SECRET = "s%40f%2Fe"
SENTINELS = f"rediss+sentinel://me:{SECRET}@one:1,two/main%20one/2?replicas=3&ssl_ca_certs=ca.pem&ssl_check_hostname=false"


def test_all_parts_of_an_url_of_sentinels() -> None:
    assert SentinelUrl.of(SENTINELS) == SentinelUrl(
        hosts=(("one", 1), ("two", 26379)),
        primary="main one",
        db=2,
        credentials={"username": "me", "password": "s@f/e"},
        replicas=3,
        tls=True,
        tls_options={"ssl_ca_certs": "ca.pem", "ssl_check_hostname": False},
    )
    assert SECRET not in masked_url(SENTINELS)


def test_what_an_url_may_leave_out() -> None:
    found = SentinelUrl.of("redis+sentinel://[::1]/main")
    assert (found.hosts, found.db, found.credentials, found.replicas, found.tls) == (
        (("::1", 26379),),
        0,
        {},
        1,
        False,
    )


@pytest.mark.parametrize(
    "url",
    [
        "",
        "redis",
        "http://host/main",
        "redis://:x",
        "redis://host:port/0",
        "redis+sentinel://host",
        "redis+sentinel://host,/main",
        "redis+sentinel:///main",
        "redis+sentinel://host:port/main",
        "redis+sentinel://host/main/first",
        "redis+sentinel://host/main?replicas=0",
        "redis+sentinel://host/main?replicas=all",
        "redis+sentinel://host/main?replica=1",
        "redis+sentinel://host/main?replicas",
        "redis+sentinel://host/main/-1",
        "redis+sentinel://host/main?ssl_ca_certs=ca.pem",
        "redis+sentinels://host/main",
    ],
)
def test_an_url_that_is_none_is_refused_by_its_key(url: str) -> None:
    assert not is_redis_url(url)
    with pytest.raises(ConfigError, match=r"queue\.redis_url"):
        RedisPlace(url, who="it", key="queue.redis_url")


def test_a_write_ends_with_a_change_that_replicas_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else WAIT would wait for nothing where a script has found its work done."""
    place = RedisPlace("redis+sentinel://h/main?replicas=2", who="it", key="queue.redis_url")
    sent: list[tuple[Any, ...]] = []

    def execute(pipeline: Pipeline) -> list[Any]:
        sent.extend(words for words, _ in pipeline.command_stack)
        return ["OK"] * (len(sent) - 1) + [2]

    monkeypatch.setattr(Pipeline, "execute", execute)
    assert place.written(lambda pipeline: pipeline.evalsha("script", 0)) == ["OK"]
    assert [words[0] for words in sent] == ["EVALSHA", "SET", "WAIT"]
    assert sent[2][1:] == (2, 5000)


@pytest.mark.parametrize("url", ["redis://", "rediss://h:1/2", "unix:///run/redis", "redis://a:b@[::1]:7/0"])
def test_an_url_of_one_server(url: str) -> None:
    assert is_redis_url(url)
