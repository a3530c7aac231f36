"""Both ends of a run's weight stream by sync.backend: over channels, stored in a folder or in Redis, or by vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncrl.config.schema import SyncConfig
from asyncrl.rpc.keys import ClientKeys
from asyncrl.sync.broadcast.stream import BroadcastPublisher, BroadcastSubscriber
from asyncrl.sync.store.blobs import Blobs, FolderBlobs
from asyncrl.sync.store.stored_publisher import StoredPublisher
from asyncrl.sync.store.stored_subscriber import StoredSubscriber
from asyncrl.sync.stream.publisher import Publisher, RankPublisher
from asyncrl.sync.stream.subscriber import Subscriber
from asyncrl.sync.tensors.shards import LiveShards, Shards


def open_publisher(
    run: str,
    rank: int,
    world: int,
    live: LiveShards,
    config: SyncConfig,
    lineage: int,
    keys: ClientKeys | None,
) -> RankPublisher:
    """The end of a learner rank. keys: that subscribers must hold too."""
    if config.stored:
        return StoredPublisher(rank, world, live, config, lineage, open_blobs(config, run))
    if config.backend == "vllm":
        among_ranks = replace(config, backend="auto", fanout=0, delta="never")
        return BroadcastPublisher(rank, world, live, among_ranks, lineage, keys)
    return Publisher(rank, world, live, config, lineage, keys)


def open_subscriber(
    run: str,
    who: str,
    endpoints: Sequence[str],
    staging: Shards,
    config: SyncConfig,
    lineage: int,
    keys: ClientKeys | None,
) -> Subscriber | StoredSubscriber:
    """The end of a generator rank. who: unique among them · endpoints: of all learner ranks, in any order."""
    if config.stored:
        return StoredSubscriber(who, endpoints, staging, config, lineage, open_blobs(config, run))
    if config.backend == "vllm":
        return BroadcastSubscriber(who, endpoints, staging, config, lineage, keys)
    return Subscriber(who, endpoints, staging, config, lineage, keys)


def open_blobs(config: SyncConfig, run: str) -> Blobs:
    """The blobs of one run, in the folder or the Redis server of `config`. Raises ConfigError."""
    if config.backend == "redis":
        from asyncrl.sync.store.redis_blobs import RedisBlobs

        assert config.redis_url is not None
        return RedisBlobs(config.redis_url, run)
    assert config.folder is not None
    return FolderBlobs(Path(config.folder) / run, fsync=config.fsync)
