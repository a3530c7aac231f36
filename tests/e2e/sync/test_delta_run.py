"""Runs whose versions differ by a few bits from each other: generators get the changes alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_functions import LENGTH
from processes import counts_of, ran, rows
from redis_server import RedisServer

from asyncrl.sync.store.redis_blobs import RedisBlobs

pytestmark = pytest.mark.slow


SMALL_STEPS = "learner.optimizer.lr=1e-7"  # moves fp32 weights of 0.02 by some units in their last place


def trained(config_file: Path, *words: str) -> Path:
    words = (*words, "sync.delta=always", SMALL_STEPS, LENGTH)
    ran("asyncrl", "train", str(config_file), *words)
    run = config_file.parent / "it"
    assert counts_of(run) == (4, 16, 0)
    return run


def test_changes_go_over_the_channels_of_a_run(config_file: Path) -> None:
    run = trained(config_file, "learner.processes=2", "queue.max_staleness=0")  # every version is waited for
    last = [row for row in rows(run) if "sync/bytes" in row][-1]
    assert last["sync/delta_bytes"] > 0
    assert 0 < last["sync/delta_bytes_ratio"] < 0.5


def test_changes_go_through_a_folder(config_file: Path) -> None:
    stored = config_file.parent / "stored"
    trained(config_file, "sync.backend=file", f"sync.folder={stored}")
    (series,) = (stored / "it" / "rank-00000").iterdir()
    kinds = {file.suffix for file in series.iterdir()}
    assert kinds == {".manifest", ".safetensors", ".delta"}


def test_changes_go_through_redis(config_file: Path, redis_server: RedisServer) -> None:
    trained(config_file, "sync.backend=redis", f"sync.redis_url={redis_server.url}")
    blobs = RedisBlobs(redis_server.url, "it")
    assert {Path(key).suffix for key in blobs.list("rank-00000")} == {".manifest", ".safetensors", ".delta"}
    blobs.close()
