"""Whatever carries the weights, staging ends up as the golden stream leaves it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_server import RedisServer
from sharding import full_tensors, grid, local_tensors, same_bits, sharded_models
from stream_cases import fetch

from asyncrl.config.schema import SyncConfig
from asyncrl.sync.factory import open_blobs
from asyncrl.sync.layout.layout import ITEM_BYTES, Box, Layout, ParamLayout, whole_layout
from asyncrl.sync.store.stored_publisher import StoredPublisher
from asyncrl.sync.store.stored_subscriber import StoredSubscriber
from asyncrl.sync.stream.publisher import Publisher
from asyncrl.sync.stream.subscriber import StagedWeights, Subscriber
from asyncrl.sync.tensors.shards import BoxTensors, Shards

Tensors = Mapping[str, BoxTensors]
DEADLINE_S = 30.0
GPUS = torch.cuda.device_count()


Stream = Subscriber | StoredSubscriber


class Transport(Protocol):
    """Both ends of one kind of stream, for a learner of some ranks."""

    def publish(self, version: int) -> None: ...

    def stream(self, who: str, layout: Layout, staging: Tensors) -> Stream: ...


def golden(layouts: Sequence[Layout], live: Sequence[Tensors], layout: Layout, staging: Tensors) -> None:
    """Every element of every source box, one after the other, without plan, buckets or channels."""
    target = Shards(layout, staging)
    for source in (Shards(*rank) for rank in zip(layouts, live, strict=True)):
        for name, param in layout.items():
            held = source.layout[name].boxes if name in source.layout else ()
            for needed in param.boxes:
                for common in filter(None, (box.intersection(needed) for box in held)):
                    target.view(name, common).copy_(source.view(name, common))


class Channels:
    """sync.backend auto, shm, tcp, gloo or nccl."""

    def __init__(self, layouts: Sequence[Layout], live: Sequence[Tensors], config: SyncConfig) -> None:
        self._config = config
        self._publishers = [
            Publisher(rank, len(layouts), Shards(layout, tensors), config, 3)
            for rank, (layout, tensors) in enumerate(zip(layouts, live, strict=True))
        ]

    def publish(self, version: int) -> None:
        for publisher in self._publishers:
            publisher.publish(version)

    def stream(self, who: str, layout: Layout, staging: Tensors) -> Stream:
        endpoints = [publisher.endpoint for publisher in self._publishers]
        return Subscriber(who, endpoints, Shards(layout, staging), self._config, 3)

    def close(self) -> None:
        for publisher in self._publishers:
            publisher.close()


class Stored:
    """sync.backend file or redis."""

    def __init__(self, layouts: Sequence[Layout], live: Sequence[Tensors], config: SyncConfig) -> None:
        self._config = config
        self._publishers = [
            StoredPublisher(rank, len(layouts), Shards(layout, tensors), config, 3, open_blobs(config, "it"))
            for rank, (layout, tensors) in enumerate(zip(layouts, live, strict=True))
        ]

    def publish(self, version: int) -> None:
        for publisher in self._publishers:
            publisher.publish(version)

    def stream(self, who: str, layout: Layout, staging: Tensors) -> Stream:
        endpoints = [publisher.endpoint for publisher in self._publishers][::-1]
        return StoredSubscriber(
            who, endpoints, Shards(layout, staging), self._config, 3, open_blobs(self._config, "it")
        )

    def close(self) -> None:
        for publisher in self._publishers:
            publisher.close()


Make = Callable[[Sequence[Layout], Sequence[Tensors], float], Any]
"""(layouts of the learner's ranks, their tensors, sync.bucket_mb) -> a Transport to be closed."""


@pytest.fixture(
    scope="module",
    params=[
        *("auto", "shm", "tcp", "gloo", "file", "redis"),
        pytest.param("nccl", marks=pytest.mark.skipif(GPUS < 2, reason="nccl needs 2 GPUs")),
    ],
)
def make(
    request: pytest.FixtureRequest, shared_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Make:
    kind = request.param
    place: dict[str, Any] = {}
    if kind == "file":
        place = {"folder": str(tmp_path_factory.mktemp("weights"))}
    elif kind == "redis":
        place = {"redis_url": shared_redis.url}

    def make(layouts: Sequence[Layout], live: Sequence[Tensors], bucket_mb: float) -> Any:
        config = SyncConfig(backend=kind, bucket_mb=bucket_mb, deadline_s=DEADLINE_S, **place)
        return (Stored if place else Channels)(layouts, live, config)

    return make


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[Layout], list[Layout]]:
    """(layouts of learner ranks, of generator ranks)."""
    sources, first = draw(sharded_models())
    generators = [first]
    for _ in range(draw(st.integers(0, 2))):
        generators.append({name: draw(some_boxes(param)) for name, param in first.items()})
    return sources, generators


@st.composite
def some_boxes(draw: st.DrawFn, param: ParamLayout) -> ParamLayout:
    cells = grid(param.shape, tuple(draw(st.integers(1, 3)) for _ in param.shape))
    return ParamLayout(param.shape, param.dtype, tuple(draw(st.lists(st.sampled_from(cells), unique=True))))


def train(layouts: Sequence[Layout], live: Sequence[Tensors], full: Mapping[str, torch.Tensor]) -> None:
    for layout, tensors in zip(layouts, live, strict=True):
        for name, parts in local_tensors(layout, full).items():
            for mine, new in zip(tensors[name], parts, strict=True):
                mine.copy_(new)


@contextmanager
def running(
    make: Make, layouts: Sequence[Layout], live: Sequence[Tensors], bucket_mb: float
) -> Iterator[tuple[Transport, ExitStack]]:
    with ExitStack() as stack:
        transport = make(layouts, live, bucket_mb)
        stack.callback(transport.close)
        yield transport, stack


def staging_of(layout: Layout, full: Mapping[str, torch.Tensor], strided: bool) -> Tensors:
    staging = local_tensors(layout, full, strided=strided)
    for parts in staging.values():
        for part in parts:
            part.zero_()
    return staging


@pytest.mark.slow
@settings(max_examples=12)
@given(pools=pools(), seed=st.integers(0, 1 << 30), strided=st.booleans())
def test_random_pools_of_any_layout(
    make: Make, pools: tuple[list[Layout], list[Layout]], seed: int, strided: bool
) -> None:
    layouts, generators = pools
    whole = {name: ParamLayout(p.shape, p.dtype, ()) for layout in layouts for name, p in layout.items()}
    live = [local_tensors(layout, full_tensors(whole), strided=strided) for layout in layouts]
    with running(make, layouts, live, 0.0005) as (transport, stack):
        stagings = [staging_of(layout, full_tensors(whole), strided) for layout in generators]
        streams = [
            transport.stream(f"generator-{number}", layout, staging)
            for number, (layout, staging) in enumerate(zip(generators, stagings, strict=True))
        ]
        for stream in streams:
            stack.callback(stream.close)
        for version, newer_than in ((0, -1), (3, 0)):
            train(layouts, live, full_tensors(whole, seed + version))
            transport.publish(version)
            for layout, staging, stream in zip(generators, stagings, streams, strict=True):
                check(fetch(stream, newer_than, DEADLINE_S), version, layout, staging, layouts, live)


def test_every_dtype_and_large_boxes(make: Make) -> None:
    """Of some megabytes, so that a box has several blocks and buckets."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        **{dtype: ((33, 9), dtype) for dtype in ITEM_BYTES},
        "scalar": ((), "float32"),
        "empty": ((0, 5), "float32"),
        "large": ((1200, 700), "float32"),
    }
    whole = whole_layout(shapes)
    rows = [
        {
            name: ParamLayout(p.shape, p.dtype, tuple(grid(p.shape, (2, 1))[rank : rank + 1]))
            if len(p.shape) == 2
            else p
            for name, p in whole.items()
        }
        for rank in range(2)
    ]
    columns = {
        name: ParamLayout(p.shape, p.dtype, (Box((0, 1), (p.shape[0], 3)),)) if len(p.shape) == 2 else p
        for name, p in whole.items()
    }
    live = [local_tensors(layout, full_tensors(whole)) for layout in rows]
    with running(make, rows, live, 0.25) as (transport, stack):
        transport.publish(0)
        for who, layout in (("a", whole), ("b", columns)):
            staging = staging_of(layout, full_tensors(whole), strided=False)
            stream = transport.stream(who, layout, staging)
            stack.callback(stream.close)
            check(fetch(stream, -1, DEADLINE_S), 0, layout, staging, rows, live)


def check(
    staged: StagedWeights | None,
    version: int,
    layout: Layout,
    staging: Tensors,
    layouts: Sequence[Layout],
    live: Sequence[Tensors],
) -> None:
    assert staged is not None
    assert staged.version == version
    expected: Any = {name: [torch.zeros_like(part) for part in parts] for name, parts in staging.items()}
    golden(layouts, live, layout, expected)
    for name, parts in expected.items():
        for mine, golden_part in zip(staging[name], parts, strict=True):
            assert same_bits(mine, golden_part), name
    assert staged.checksum is not None
    assert staged.checksum.holds(Shards(layout, staging))
    assert staged.bytes == sum(param.bytes for param in layout.values())
