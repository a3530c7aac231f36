"""What the weight stream costs: memory at both ends, and no decoding time while a version is on its way."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from stream_cases import LARGE, LARGE_CONFIG, SMALL, Generator, Learner, closing_all

import asyncrl.sync.stream.link as link_module
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.engines.receiver import WeightReader
from asyncrl.generator.engines.scripted_engine import ScriptedEngine
from asyncrl.generator.weights import WeightFollower
from asyncrl.sync.channels.channel import Transfer
from asyncrl.sync.layout.layout import layout_bytes, whole_layout
from asyncrl.sync.tensors.shards import Shards, TensorBuffer
from asyncrl.types import Sampling
from bench.sync.engine import OneLearner, SlowChannel

closing = pytest.fixture(closing_all)


def test_an_arena_holds_what_it_took_in_as_many_bytes() -> None:
    layout = whole_layout(SMALL)
    live = {name: torch.randn(shape).to(getattr(torch, dtype)) for name, (shape, dtype) in SMALL.items()}
    before = {name: tensor.clone() for name, tensor in live.items()}
    shards = Shards(layout, live)
    arena = TensorBuffer(shards.layout, shards.device)
    assert arena.floor() > 0
    assert arena.take(shards) > 0
    assert arena.bytes == layout_bytes(layout) == 30 * 8 * 4 + 8 * 4 + 12 * 8 * 2
    for tensor in live.values():
        tensor.zero_()
    assert all(torch.equal(arena.shards.tensors[name][0], before[name]) for name in live)


@pytest.mark.parametrize("snapshots", [1, 2])
def test_a_learner_rank_allocates_a_shard_for_each_snapshot(snapshots: int, closing: Callable) -> None:
    config = replace(LARGE_CONFIG, snapshots=snapshots, delta="never")
    learner = closing(Learner(LARGE, 2, config))
    generator = closing(Generator("g", learner, learner.whole, config))
    for version in range(3):
        learner.publish(version)
        generator.check(generator.fetch(version - 1, 20.0), version)
    for publisher, layout in zip(learner.publishers, learner.layouts, strict=True):
        assert publisher.stats()["snapshot_bytes"] == snapshots * layout_bytes(layout)


def test_the_buckets_of_all_sources_of_a_generator_together_are_as_large_as_two(closing: Callable) -> None:
    config = replace(LARGE_CONFIG, bucket_mb=4.0)
    learner = closing(Learner(LARGE, 2, config))
    generator = closing(Generator("g", learner, learner.whole, config))
    learner.publish(0)
    generator.check(generator.fetch(-1, 20.0), 0)
    largest = [
        max(bucket.length for bucket in source.plan.buckets) for source in generator.subscriber._sources
    ]
    assert sum(2 * bytes_ for bytes_ in largest) <= 2 * config.bucket_bytes


class CountingEngine(ScriptedEngine):
    """Counts its steps, so that another thread can wait for the next one; notes when it was flipped."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__(lambda ordinal, sample: [1] * 10_000, max_length=20_000, targets=parameters)
        self.steps = 0
        self.stepped = threading.Condition()
        self.flipped_at: list[int] = []

    def _step(self) -> None:
        with self.stepped:
            super()._step()
            self.steps += 1
            self.stepped.notify_all()

    async def flip(self, staged: Any, version: int) -> float:
        self.flipped_at.append(self.steps)
        return await super().flip(staged, version)

    def wait_for_steps(self, count: int) -> None:
        with self.stepped:
            until = self.steps + count
            assert self.stepped.wait_for(lambda: self.steps >= until, 20.0)


async def sample_for_ever(engine: CountingEngine) -> None:
    """However late the first bucket comes, there is something to decode."""
    prompt = torch.zeros(1, dtype=torch.int64).numpy()
    for number in itertools.count():
        await engine.sample(SampleRequest(str(number), prompt, Sampling(max_tokens=9_000), 0))


async def test_decoding_goes_on_while_a_version_crosses_a_slow_link(
    closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(LARGE_CONFIG, delta="never")
    learner = closing(Learner(LARGE, 1, config))
    live = {"w": torch.zeros(4096, 1024)}
    engine = CountingEngine(live)
    arrived: list[tuple[int, int]] = []
    opened = link_module.connect

    def receive(transfer: Transfer, nbytes: int, seconds: float) -> None:
        """A bucket takes as long as the engine takes for three steps."""
        engine.wait_for_steps(3)
        transfer.wait(seconds)
        arrived.append((engine.steps, nbytes))

    monkeypatch.setattr(link_module, "connect", lambda *of, **more: SlowChannel(opened(*of, **more), receive))
    receiver = engine.receiver(WeightReader("run", "g", config))
    follower = WeightFollower("g", receiver, OneLearner(learner.endpoints))
    learner.publish(0)
    await engine.start()
    sampling, following = asyncio.create_task(sample_for_ever(engine)), asyncio.create_task(follower.run())
    try:
        async with asyncio.timeout(20.0):
            await follower.past(-1, -1)
    finally:
        following.cancel()
        sampling.cancel()
        await asyncio.gather(following, sampling, return_exceptions=True)
        await engine.close()
    buckets = [steps for steps, bytes_ in arrived if bytes_ >= config.bucket_bytes // 2]
    assert len(buckets) == 16, "16 MB in buckets of 1 MB"
    assert buckets[-1] - buckets[0] >= 3 * 15, "it decoded all the while"
    assert len(engine.flipped_at) == 1
    assert engine.flipped_at[0] >= buckets[-1], "the flip began after the last bucket"
    assert torch.equal(live["w"].view(torch.uint8), learner.at(0)["w"].view(torch.uint8))
