"""Both ends of a run's weight stream, as sync.backend says: over channels, or stored in a folder or in Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.config.schema import SyncConfig
from asyncrl.rpc.keys import ClientKeys
from asyncrl.sync.layout.layout import Layout
from asyncrl.sync.store.blobs import open_blobs
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
    """Of one learner rank; see the classes."""
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
    """Of one generator rank; see the classes."""
    if config.stored:
        return StoredStream(who, endpoints, layout, config, staging, open_blobs(config, run), lineage)
    return Subscriber(who, endpoints, layout, config, staging, lineage, keys)
