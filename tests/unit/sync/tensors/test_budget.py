"""The bytes of a plan of memory are those that are allocated."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.rules import check_section
from asyncrl.config.schema import Config, ModelConfig, SyncConfig
from asyncrl.config.sections.generator import GeneratorConfig, VllmConfig
from asyncrl.config.sections.learner import LearnerConfig, ParallelConfig
from asyncrl.config.sections.placement import PlacementConfig
from asyncrl.device import accelerator
from asyncrl.errors import ConfigError
from asyncrl.generator.engines import receiver
from asyncrl.generator.engines.vllm import vllm_memory
from asyncrl.launch import memory
from asyncrl.launch.memory import check_memory, generator_memory, learner_memory
from asyncrl.sync.channels.shared_memory import allocated_bytes
from asyncrl.sync.layout.layout import Layout
from asyncrl.sync.layout.predicted_sharding import Heads
from asyncrl.sync.plan.cost_model import ModelCost, PoolShape, generator_layout
from asyncrl.sync.stream.snapshot import SnapshotMemory
from asyncrl.sync.tensors.budget import MemoryPart, copy_bytes, stages_on_device, total
from asyncrl.sync.tensors.shards import Shards, TensorBuffer, layout_of

GB = 10**9
MODEL = ModelCost(
    {"up_proj.weight": ((4000, 1000), "bfloat16"), "norm.weight": ((1001,), "bfloat16")}, Heads(0, 0, 1)
)


def of(parts: list[MemoryPart], name: str) -> int:
    return next(part.bytes for part in parts if part.name == name)


@settings(max_examples=6, deadline=None)  # each collects the garbage of the whole session
@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=5), st.integers(1, 2))
def test_staging_and_snapshots_take_the_bytes_of_the_plan(shapes: list[list[int]], snapshots: int) -> None:
    live = {f"p{index}": torch.zeros(shape, dtype=torch.bfloat16) for index, shape in enumerate(shapes)}
    layout = layout_of(live)
    gc.collect()  # shared memory of earlier tests
    before = allocated_bytes()
    staging = TensorBuffer(layout, torch.device("cpu"))
    assert allocated_bytes() - before == copy_bytes(layout) == len(staging.memory)
    taken = SnapshotMemory(Shards(layout, live), snapshots)
    assert allocated_bytes() - before == (1 + snapshots) * copy_bytes(layout)
    assert taken.allocated == snapshots * copy_bytes(layout)


def test_a_generator_rank_by_hand() -> None:
    """Two ranks: half of the rows, and the whole norm, whose 2002 bytes end at the next multiple of 16."""
    config = Config(
        model=ModelConfig(path="x", dtype="bfloat16"),
        sync=SyncConfig(bucket_mb=64),
        generator=GeneratorConfig(engine="vllm", vllm=VllmConfig(dtype="float32")),
    )
    parts = generator_memory(config, MODEL, PoolShape(tp=2), learner_ranks=4, device_bytes=None)
    assert of(parts, "weights") == 4 * (2000 * 1000 + 1001), "in vLLM's own dtype"
    assert of(parts, "staging") == 2 * 2000 * 1000 + 2016
    assert of(parts, "buckets") == 2 * 4 * (16 << 20), "two from each learner rank"

    config = replace(config, sync=SyncConfig(bucket_mb=64, backend="vllm", verify=False))
    parts = generator_memory(config, MODEL, PoolShape(tp=2), learner_ranks=4, device_bytes=None)
    chunk = (64 << 20) + 2 * 4000 * 1000
    assert (of(parts, "staging"), of(parts, "buckets")) == (0, 3 * chunk), "of whole parameters"
    assert of(parts, "checksum") == 0, "nothing is hashed"


def test_a_megatron_rank_by_hand() -> None:
    """Two stages, two that share matrices, experts over four; the other ranks have copies of weights and gradients."""
    expert, dense = ("model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.self_attn.o_proj.weight")
    model = ModelCost({expert: ((80, 10), "bfloat16"), dense: ((40, 10), "bfloat16")}, Heads(0, 0, 1))
    parallel = ParallelConfig(pipeline=2, tensor=2, expert=4)
    config = Config(
        model=ModelConfig(path="x", dtype="bfloat16"),
        learner=LearnerConfig(backend="megatron", processes=16, parallel=parallel),
    )
    parts = learner_memory(config, model, PoolShape(fsdp=16), streams=1)
    held = 800 // 8 + 400 // 4
    assert of(parts, "weights") == 2 * held
    shard = 5 * 10 + 3 * 10  # the rows of the first of 16 ranks
    assert of(parts, "masters, gradients, Adam") == 4 * held + 12 * shard
    assert not any("offload" in part.frees for part in parts), "it has none"


def test_a_learner_rank_by_hand() -> None:
    config = Config(model=ModelConfig(path="x", dtype="bfloat16"), sync=SyncConfig(snapshots=2, bucket_mb=1))
    parts = learner_memory(config, MODEL, PoolShape(fsdp=4), streams=3)
    rows = 1000 * 1000 + 251  # of four ranks; of 1001 elements the first three have 251
    assert of(parts, "weights") == 2 * rows
    assert of(parts, "masters, gradients, Adam") == 16 * rows
    assert of(parts, "buckets") == 2 * 3 * (1 << 20)
    one = learner_memory(
        Config(model=config.model, sync=SyncConfig(snapshots=1)), MODEL, PoolShape(fsdp=4), 3
    )
    assert of(parts, "2 snapshots") == 2 * of(one, "1 snapshot")

    config = replace(
        config,
        sync=SyncConfig(bucket_mb=1, backend="vllm", verify=False),
        generator=GeneratorConfig(engine="vllm"),
    )
    parts = learner_memory(config, MODEL, PoolShape(fsdp=4), streams=3)
    chunk = (1 << 20) + 2 * 4000 * 1000
    assert of(parts, "buckets") == 2 * (1 << 20) + 2 * chunk, (
        "to the whole copy of rank 0 alone, and its chunks"
    )
    assert of(parts, "checksum") == 0, "nothing is hashed"
    assert not any("sync.fanout" in part.frees for part in parts), "the configuration refuses it"


@pytest.mark.parametrize(
    ("staging", "backend", "granted", "on_device"),
    [
        ("auto", "auto", 40, True),
        ("auto", "auto", 39, False),
        ("auto", "tcp", 400, False),
        ("device", "auto", 39, True),
        ("host", "auto", 400, False),
    ],
)
def test_staging_lies_on_the_device_where_a_quarter_is_left(
    staging: str, backend: str, granted: int, on_device: bool
) -> None:
    sync = SyncConfig(staging=staging, backend=backend)  # type: ignore[arg-type]
    parts = [MemoryPart("weights", 15 * GB), MemoryPart("staging", 15 * GB)]
    assert stages_on_device(sync, parts, granted * GB) == on_device


def vllm(share: float, staging: str = "auto", **ours: object) -> Config:
    return Config(
        model=ModelConfig(path="x", dtype="bfloat16"),
        sync=SyncConfig(staging=staging, bucket_mb=0.5),  # type: ignore[arg-type]
        generator=GeneratorConfig(engine="vllm", vllm=VllmConfig(gpu_memory_share=share, **ours)),  # type: ignore[arg-type]
    )


def test_vllm_may_take_its_share_without_the_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_memory, "checkpoint_shapes", lambda model: (MODEL.shapes, MODEL.heads))
    device = 10 * GB
    layout = generator_layout(MODEL, PoolShape()).rank(0)
    reserved = total(vllm_memory.rank_parts(vllm(0.9), layout, 1, device)) - 2 * (4000 * 1000 + 1001)
    assert reserved > copy_bytes(layout)
    assert vllm_memory.share_of_vllm(vllm(0.9), device) == pytest.approx(0.9 - reserved / device)
    on_host = vllm_memory.share_of_vllm(vllm(0.9, "host"), device)
    assert on_host == pytest.approx(0.9 - (reserved - copy_bytes(layout) - (1 << 20)) / device)
    with pytest.raises(
        ConfigError, match=r"a rank needs weights 0.01 GB, staging 0.01 GB(.|\n)*sync.staging=host"
    ):
        vllm_memory.share_of_vllm(vllm(0.02, "device"), device)
    with pytest.raises(ConfigError, match=r"tensor_parallel=2"):
        vllm_memory.share_of_vllm(vllm(0.9, kv_cache_mb=8500), device)


def test_a_learner_that_its_device_cannot_hold_is_refused() -> None:
    config = Config(model=ModelConfig(path="x", dtype="bfloat16"), learner=LearnerConfig(processes=2))
    check_memory(config, MODEL, PoolShape(fsdp=2), GB)
    with pytest.raises(
        ConfigError, match=r"learner.processes(.|\n)*2 snapshots 0.01 GB(.|\n)*sync.snapshot_device=host"
    ):
        check_memory(config, MODEL, PoolShape(fsdp=2), 10_000_000)


def test_each_pool_of_generators_has_memory_of_its_own() -> None:
    """And the learner sends to all of them at once."""

    def of_pools(**keys: object) -> Config:
        small = {"engine": "vllm", "count": 4, "vllm": {"tensor_parallel": 2, **keys}}
        return replace(vllm(0.9), placement=PlacementConfig(generators={"small": small}))

    check_memory(of_pools(), MODEL, PoolShape(), 10 * GB)
    at = r"placement\.generators\.small\.vllm\."
    with pytest.raises(ConfigError, match=rf"^{at}gpu_memory_share = 0\.001(.|\n)*{at}tensor_parallel=4"):
        check_memory(of_pools(gpu_memory_share=0.001), MODEL, PoolShape(), 10 * GB)
    on_cpus = {"engine": "vllm", "devices": "", "vllm": {"kv_cache_mb": 20_000}}
    beside = PlacementConfig(generators={"cpus": on_cpus})
    check_memory(replace(vllm(0.9), placement=beside), MODEL, PoolShape(), 10 * GB)
    streams: list[int] = []

    def of_streams(*given: Any) -> list[MemoryPart]:
        streams.append(given[-1])
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "learner_memory", of_streams)
        check_memory(of_pools(), MODEL, PoolShape(), 10 * GB)
    assert streams == [1 + 4 * 2]


@pytest.mark.parametrize(
    ("staging", "backend", "free", "where"),
    [
        ("auto", "auto", 100, "meta"),
        ("auto", "auto", 1, "pinned cpu"),
        ("device", "auto", 1, "meta"),
        ("host", "auto", 100, "pinned cpu"),
        ("auto", "tcp", 100, "pinned cpu"),
    ],
)
def test_a_reader_stages_where_there_is_room(
    staging: str, backend: str, free: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without memory stands for a GPU, with so many GB free after the engine has taken its share."""
    monkeypatch.setattr(accelerator, "is_accelerator", lambda device: device.type == "meta")
    monkeypatch.setattr(accelerator, "memory_bytes", lambda device: (free * GB, 100 * GB))

    def buffer(layout: Layout, device: torch.device, pinned: bool = False) -> str:
        return f"pinned {device}" if pinned else str(device)

    monkeypatch.setattr(receiver, "TensorBuffer", buffer)
    sync = SyncConfig(staging=staging, backend=backend)  # type: ignore[arg-type]
    layout = generator_layout(MODEL, PoolShape()).rank(0)
    reader = receiver.WeightReader("run", "generator-0/0", sync)
    assert reader.staging(layout, torch.device("meta")) == where
    assert reader.staging(layout, torch.device("cpu")) == "cpu"


def test_staging_on_the_device_is_not_for_backends_of_the_host() -> None:
    with pytest.raises(ConfigError, match=r"sync.staging"):
        check_section(SyncConfig(staging="device", backend="tcp"), "sync")
