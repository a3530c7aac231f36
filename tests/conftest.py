"""What several folders of tests share: a tiny model, a real Redis, and examples of hypothesis that have no deadline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from redis_server import RedisServer

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some thousand parameters."""
    from asyncrl.tasks.addition import write_model_folder

    folder = tmp_path_factory.mktemp("model")
    write_model_folder(folder, hidden_size=32, layers=2)
    return folder


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """Empty."""
    shared_redis.client.flushall()
    return shared_redis


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """One that a test may kill and start again; it keeps what it has answered."""
    server = RedisServer(tmp_path, "--appendonly", "yes", "--appendfsync", "always")
    yield server
    server.kill()
