"""Runs whose weights go through a store: a folder, and Redis, from which generators read what the learner wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import counts_of, ran, rows
from redis_server import RedisServer

pytestmark = pytest.mark.slow


def train_through(config_file: Path, *words: str) -> None:
    """A run to version 4."""
    ran("asyncrl", "train", str(config_file), *words, "queue.max_staleness=1")
    run = config_file.parent / "it"
    assert counts_of(run) == (4, 16, 0)
    assert max(row["train/staleness/max"] for row in rows(run)) <= 1


def test_a_run_over_a_folder_leaves_the_last_version_of_each_rank(config_file: Path) -> None:
    stored = config_file.parent / "stored"
    train_through(config_file, "sync.backend=file", f"sync.folder={stored}", "learner.processes=2")
    for rank in ("rank-00000", "rank-00001"):
        (series,) = (stored / "it" / rank).iterdir()
        names = sorted(file.name for file in series.iterdir())
        assert "00000004.manifest" in names
        assert names[1].endswith(".safetensors"), "the oldest that stays is whole, whatever follows it"


def test_a_run_over_redis_leaves_only_what_expires(config_file: Path, redis_server: RedisServer) -> None:
    words = ("sync.backend=redis", f"sync.redis_url={redis_server.url}", "sync.delta=never")
    train_through(config_file, *words)
    client = redis_server.client
    keys = list(client.scan_iter("asyncrl:{it}:weights*"))
    assert len(keys) == 1 + 2 * 2, "the index; of two versions a manifest and tensors, a chunk each"
    assert all(client.ttl(key) > 0 for key in keys)
