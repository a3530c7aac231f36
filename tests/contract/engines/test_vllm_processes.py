"""Real vLLM on the CPU in other processes than usual: replicas of two ranks each, and spawned as on a GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np
import pytest
from engine_cases import (
    CLOSE,
    SIZES,
    SYNC,
    from_config,
    log_probs,
    nudged,
    request,
    update,
    vllm_config,
    weights_of,
    with_weights,
)
from missing import needs_vllm
from transformers import PreTrainedModel, Qwen3Config
from waiting import eventually

from asyncrl.config.sections.generator import VllmConfig
from asyncrl.generator.engines.receiver import Learner, WeightReader
from asyncrl.generator.engines.vllm.vllm_engine import VllmEngine
from asyncrl.generator.engines.vllm.vllm_start import METHOD
from asyncrl.sync.stream.publisher import Publisher
from asyncrl.sync.tensors.shards import Shards, layout_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # an engine starts in seconds, or in minutes where many share the cores
    needs_vllm,
]


@asynccontextmanager
async def started(folder: Path, ours: VllmConfig) -> AsyncIterator[tuple[VllmEngine, PreTrainedModel]]:
    model = from_config(Qwen3Config(**SIZES), folder)
    engine = VllmEngine(vllm_config(folder, vllm=ours), "generator-0", ())
    await engine.start()
    try:
        yield engine, model
    finally:
        await engine.close()


async def test_each_rank_of_each_replica_reads_and_holds_every_version(tmp_path: Path) -> None:
    async with started(tmp_path, VllmConfig(tensor_parallel=2, data_parallel=2)) as (engine, model):
        receiver = engine.receiver(WeightReader("run", "generator-0", SYNC))
        readers = ["generator-0", *(f"generator-0/{rank}" for rank in range(4))]
        for version in (1, 2):
            weights = nudged(weights_of(model), version)
            with_weights(model, weights)
            publisher = Publisher(0, 1, Shards(layout_of(weights), weights), SYNC, lineage=0)
            try:
                publisher.publish(version)
                await receiver.open(Learner((publisher.endpoint,), 0))
                assert (await receiver.stage(version)).version == version
                await receiver.flip(version)
                await receiver.verify()  # the checksum of each rank
                await receiver.held(version)
                await eventually(
                    lambda of=publisher, at=version: of._members.versions() == dict.fromkeys(readers, at)
                )
            finally:
                publisher.close(5.0)
            for turn in await engine.sample(request(f"at {version}", n=8, max_tokens=20, prompt=40)):
                np.testing.assert_allclose(turn.logprobs, log_probs(model, turn), **CLOSE)
                assert (turn.versions == version).all()
        assert set(engine._counters._load) == {0, 1}, "both replicas made tokens"
        await receiver.close()


async def test_a_spawned_engine_takes_weights_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where its driver forbids to fork: the process has nothing of this one."""
    monkeypatch.setenv(METHOD, "spawn")
    async with started(tmp_path, VllmConfig()) as (engine, model):
        (core,) = [one for one in multiprocessing.active_children() if one.name == "EngineCore"]
        assert isinstance(core, SpawnProcess)
        weights = nudged(weights_of(model))
        await update(engine, weights)
        with_weights(model, weights)
        for turn in await engine.sample(request("a", n=2, max_tokens=20, prompt=40)):
            np.testing.assert_allclose(turn.logprobs, log_probs(model, turn), **CLOSE)
