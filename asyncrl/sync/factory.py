"""Both ends of a run's weight stream by sync.backend: over channels, or stored in a folder or in Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.config.schema import SyncConfig
from asyncrl.rpc.keys import ClientKeys
from asyncrl.sync.layout.layout import Layout
from asyncrl.sync.store.blobs import Blobs, FolderBlobs
from asyncrl.sync.store.stored_publisher import StoredPublisher
from asyncrl.sync.store.stored_stream import StoredStream
from asyncrl.sync.stream.publisher import Publisher
from asyncrl.sync.stream.subscriber import Subscriber
from asyncrl.sync.tensors.bucket import BoxTensors


def open_publisher(
    run: str,
    rank: int,
    world: int,
    layout: Layout,
    tensors: Mapping[str, BoxTensors],
    config: SyncConfig,
    lineage: int,
    keys: ClientKeys | None = None,
) -> Publisher | StoredPublisher:
    """The end of a learner rank; see the classes for arguments and errors."""
    if config.stored:
        return StoredPublisher(rank, world, layout, tensors, config, lineage, open_blobs(config, run))
    return Publisher(rank, world, layout, tensors, config, lineage, keys)


def open_stream(
    run: str,
    who: str,
    endpoints: Sequence[str],
    layout: Layout,
    config: SyncConfig,
    staging: Mapping[str, BoxTensors],
    lineage: int,
    keys: ClientKeys | None = None,
) -> Subscriber | StoredStream:
    """The end of a generator rank; see the classes for arguments and errors."""
    if config.stored:
        return StoredStream(who, endpoints, layout, config, staging, open_blobs(config, run), lineage)
    return Subscriber(who, endpoints, layout, config, staging, lineage, keys)


def open_blobs(config: SyncConfig, run: str) -> Blobs:
    """The blobs of one run, in the folder or the Redis server of `config`. Raises ConfigError."""
    if config.backend == "redis":
        from asyncrl.sync.store.redis_blobs import RedisBlobs

        assert config.redis_url is not None
        return RedisBlobs(config.redis_url, run)
    assert config.folder is not None
    return FolderBlobs(Path(config.folder) / run, fsync=config.fsync)
