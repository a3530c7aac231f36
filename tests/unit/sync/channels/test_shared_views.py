from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from sharding import full_tensors, local_tensors, same_bits, sharded_models

from asyncrl.errors import WeightSyncError
from asyncrl.sync.channels.shared_memory import described, shared_memory, shared_views
from asyncrl.sync.tensors.shards import Shards, TensorBuffer


def test_numbers_by_hand() -> None:
    memory = shared_memory(96)
    matrix = memory[32:80].view(torch.float32).view(3, 4)
    segment, numbers = described([matrix, matrix[1:, 2:], matrix.t(), memory[5]]) or pytest.fail("not shared")
    assert segment.size == 96
    assert numbers == [32, 4, 1, 32 + 4 * 6, 4, 1, 32, 1, 4, 5]
    matrix.copy_(torch.arange(12.0).view(3, 4))
    like = [torch.empty(3, 4), torch.empty(2, 2), torch.empty(4, 3), torch.empty((), dtype=torch.uint8)]
    assert [found.tolist() for found in shared_views(memory, like, numbers)[1:3]] == [
        [[6, 7], [10, 11]],
        matrix.t().tolist(),
    ]


def test_what_does_not_lie_in_one_segment_has_no_place() -> None:
    here, there = shared_memory(64), shared_memory(64)
    assert described([here[:8], here[56:]])
    assert described([here[:8], there[:8]]) is None
    assert described([here[:8], here[:8].clone()]) is None
    assert described([here.clone()]) is None


@pytest.mark.parametrize(
    "numbers", [[], [0, 1], [0, 4, 1, 0], [56, 4, 1], [2, 4, 1], [0, 9, 1], [0, 1 << 40, 1], [1 << 63, 1, 1]]
)
def test_numbers_that_lead_astray_are_refused(numbers: list[int]) -> None:
    with pytest.raises(WeightSyncError):
        shared_views(torch.zeros(64, dtype=torch.uint8), [torch.empty(3, 4)], numbers)


@given(sharded_models())
def test_an_arena_is_read_where_it_lies(model: tuple) -> None:
    _, layout = model
    shards = Shards(layout, local_tensors(layout, full_tensors(layout)))
    assume(shards.parts)
    arena = TensorBuffer(shards.layout, shards.device)
    arena.take(shards)
    _, numbers = described(arena.shards.parts) or pytest.fail("not shared")
    found = shared_views(arena.memory, shards.parts, numbers)
    assert all(map(same_bits, found, shards.parts))
