"""From observed copies to boxes, without vLLM: plain tensors stand for the checkpoint and for the fused parameter."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.generator.engines.vllm.vllm_layout import Copy, Region, merge_regions, region_of
from asyncrl.sync.layout.layout import Box


def observed(name: str, source: torch.Tensor, owner: str, into: torch.Tensor) -> Copy:
    return Copy(
        name,
        owner,
        tuple(source.shape),
        source.storage_offset(),
        tuple(source.stride()),
        into.storage_offset(),
        tuple(into.stride()),
    )


def filled(region: Region, fused: torch.Tensor, full: torch.Tensor) -> None:
    view = torch.as_strided(fused, region.box.shape, region.strides, region.offset)
    view.copy_(full[region.box.slices()])


def test_a_row_shard_of_a_fused_matrix() -> None:
    checkpoint, fused = torch.empty(8, 4), torch.empty(6, 4)
    region = region_of(observed("k", checkpoint[4:6], "qkv", fused[2:4]), (8, 4))
    assert region == Region(Box((4, 0), (2, 4)), "qkv", 8, (4, 1))


def test_a_transposed_copy_keeps_the_box_and_turns_the_strides() -> None:
    checkpoint, fused = torch.empty(3, 5), torch.empty(5, 3)
    region = region_of(observed("w", checkpoint.t(), "w", fused), (3, 5))
    assert region == Region(Box((0, 0), (3, 5)), "w", 0, (1, 3))


def test_one_expert_of_a_stacked_parameter() -> None:
    checkpoint, fused = torch.empty(4, 6, 5), torch.empty(4, 6, 5)
    region = region_of(observed("w", checkpoint[2, :3], "w13", fused[2, :3]), (4, 6, 5))
    assert region == Region(Box((2, 0, 0), (1, 3, 5)), "w13", 60, (0, 5, 1))


def test_what_is_no_box_is_told() -> None:
    checkpoint = torch.empty(6, 4)
    assert region_of(observed("w", checkpoint[::2], "w", torch.empty(3, 4)), (6, 4)) is None
    assert region_of(observed("w", checkpoint.flatten(), "w", torch.empty(24)), (6, 4)) is None


def test_neighbours_in_both_memories_become_one() -> None:
    checkpoint, fused = torch.empty(4, 6, 5), torch.empty(4, 6, 5)
    parts = [
        observed("w", checkpoint[e, half], "w13", fused[e, half])
        for e in range(4)
        for half in (slice(0, 3), slice(3, 6))
    ]
    regions = [region_of(part, (4, 6, 5)) for part in parts]
    assert merge_regions([r for r in regions if r]) == [
        Region(Box((0, 0, 0), (4, 6, 5)), "w13", 0, (30, 5, 1))
    ]


def test_neighbours_that_lie_apart_stay_apart() -> None:
    checkpoint, fused = torch.empty(4, 5), torch.empty(6, 5)
    parts = [
        observed("w", checkpoint[:2], "f", fused[:2]),
        observed("w", checkpoint[2:], "f", fused[4:]),
    ]
    regions = [region for part in parts if (region := region_of(part, (4, 5)))]
    assert merge_regions(regions) == regions


@given(st.data())
def test_copies_by_region_are_the_copies_that_were_seen(data: st.DataObject) -> None:
    """Any grid of views of a checkpoint tensor, loaded into any permutation of its axes in memory."""
    full_shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    order = data.draw(st.permutations(range(len(full_shape))))
    full = torch.arange(math.prod(full_shape)).reshape(full_shape)
    memory = torch.full(tuple(full_shape[axis] for axis in order), -1)
    target = memory.permute(*[order.index(axis) for axis in range(len(full_shape))])
    cut = data.draw(st.integers(0, len(full_shape) - 1))
    regions = []
    for start in range(full_shape[cut]):
        at = tuple(slice(None) if axis != cut else slice(start, start + 1) for axis in range(len(full_shape)))
        region = region_of(observed("w", full[at], "m", target[at]), full_shape)
        assert region is not None
        regions.append(region)
    few = merge_regions(regions)
    for region in few:
        filled(region, memory, full)
    assert torch.equal(target, full)
    assert sum(region.box.elements for region in few) == full.numel()
