"""The way of a weight from the learner's GPU to a generator's, over tensors that say they lie on one: each operator
exists on CUDA, the host waits as often as is written here, and the bits arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from delta_cases import stepped
from hypothesis import given, settings
from pretended_gpu import GPU, PretendedGpu
from sharding import full_tensors, local_tensors, same_bits, sharded_models

import asyncrl.sync.delta.delta_chain as delta_chain
from asyncrl.device.accelerator import CPU
from asyncrl.sync.delta.delta_chain import make_step, route
from asyncrl.sync.delta.delta_stream import _make_step
from asyncrl.sync.layout.layout import Layout, whole_layout
from asyncrl.sync.plan.plan import SourcePlan, plan
from asyncrl.sync.tensors.bucket import pack_bucket, unpack_bucket
from asyncrl.sync.tensors.checksum import Checksum, ChecksumShare
from asyncrl.sync.tensors.shards import Shards, TensorBuffer

LAYOUT = whole_layout({"w": ((40, 10), "bfloat16"), "norm": ((10,), "float32")})


def on(gpu: PretendedGpu, layout: Layout, full: Mapping[str, torch.Tensor]) -> Shards:
    local = local_tensors(layout, full)
    return Shards(layout, {name: [gpu.tensor(part) for part in parts] for name, parts in local.items()})


def waited(gpu: PretendedGpu) -> list[str]:
    """The waits since the last call."""
    names = [wait.split(" at ")[0] for wait in gpu.waits]
    gpu.waits.clear()
    assert gpu.uploads == []
    return names


def move(source: SourcePlan, snapshot: Shards, staged: Shards) -> None:
    for bucket in source.buckets:
        packed = pack_bucket(bucket, snapshot, torch.zeros(bucket.length, dtype=torch.uint8, device=GPU))
        unpack_bucket(bucket, staged, packed)


def test_the_host_waits_for_hashes_and_changes_alone() -> None:
    (source,) = plan([LAYOUT], LAYOUT, 256).sources
    versions = [full_tensors(LAYOUT)]
    versions.append(stepped(versions[0], 0.02, 1))
    with PretendedGpu() as gpu, pytest.MonkeyPatch.context() as patch:
        old, live = (on(gpu, LAYOUT, version) for version in versions)
        snapshot, staged = TensorBuffer(LAYOUT, GPU), TensorBuffer(LAYOUT, GPU)
        snapshot.take(live)
        move(source, snapshot.shards, staged.shards)
        engine = on(gpu, LAYOUT, versions[0])
        torch._foreach_copy_(engine.parts, staged.shards.parts)  # the flip
        assert waited(gpu) == []

        share = ChecksumShare.of(source.pieces, snapshot.shards)
        assert waited(gpu) == ["_local_scalar_dense"]
        Checksum(share, tuple(source.pieces)).check(engine, "the parameters")
        assert waited(gpu) == ["_local_scalar_dense"]

        # 3 rows of 20 bytes in a tile: 14 tiles of w, one of norm, in two readings.
        patch.setattr(delta_chain, "DEVICE_TILE_BYTES", 64)
        patch.setattr(delta_chain, "DEVICE_TILES", 8)
        step = make_step(0, 1, old, live, lambda: True)
        assert step is not None
        assert waited(gpu) == ["tolist", "to the CPU"] * 2
        patch.setattr(delta_chain, "TILE_BYTES", 64)
        on_cpu = make_step(0, 1, *(Shards(LAYOUT, local_tensors(LAYOUT, v)) for v in versions), lambda: True)
        assert on_cpu is not None
        messages, expected = (
            route(each, source, LAYOUT, deflated=False, in_time=lambda: True) for each in (step, on_cpu)
        )
        assert messages is not None
        assert expected is not None
        assert all(map(torch.equal, messages, expected))
        assert waited(gpu) == []

        changed = [(b, m.to(GPU)) for b, m in zip(source.buckets, messages, strict=True) if m.numel()]
        gpu.uploads.clear()
        for bucket, message in changed:
            _make_step(message, bucket, old)
        gpu.uploads.clear()  # positions and steps of each piece
        assert waited(gpu) == ["to the CPU"] * len(changed)
        assert all(same_bits(a.memory, b.memory) for a, b in zip(old.parts, live.parts, strict=True))


def test_a_snapshot_on_the_host_is_queued_as_a_whole() -> None:
    full = full_tensors(LAYOUT)
    with PretendedGpu() as gpu:
        snapshot = TensorBuffer(LAYOUT, CPU, pinned=True)
        snapshot.take(on(gpu, LAYOUT, full))
        assert waited(gpu) == []
    assert all(same_bits(part, full[name]) for name, (part,) in snapshot.shards.tensors.items())


@settings(max_examples=8)
@given(sharded_models())
def test_bits_arrive_from_any_sharding(model: tuple[Sequence[Layout], Layout]) -> None:
    sources, destination = model
    full = full_tensors(destination)
    with PretendedGpu() as gpu:
        staged = on(gpu, destination, {name: torch.zeros_like(t) for name, t in full.items()})
        made, shares = plan(sources, destination, 100), []
        for source in made.sources:
            held = on(gpu, sources[source.rank], full)
            move(source, held, staged)
            shares.append(ChecksumShare.of(source.pieces, held))
        checksum = Checksum.joined(shares, (piece for source in made.sources for piece in source.pieces))
        assert checksum is not None
        assert checksum.holds(staged)
    for name, expected in local_tensors(destination, full).items():
        for part, wanted in zip(staged.tensors.get(name, ()), expected, strict=True):
            assert same_bits(part.memory, wanted)
