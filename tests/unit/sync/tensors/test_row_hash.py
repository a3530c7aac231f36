from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from sharding import DTYPES, full_tensors, grid

from asyncrl.sync.layout.layout import Box, whole_layout
from asyncrl.sync.tensors.checksum import MOD, MOST_COLUMNS, ROWS_BYTES, _padded, row_digest


def of_whole(tensor: torch.Tensor, name: str = "w") -> int:
    shape = tuple(tensor.shape)
    return row_digest(tensor, Box.whole(shape), shape, name)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4)), max_size=3), st.sampled_from(DTYPES))
def test_shares_of_a_partition_add_up_to_the_whole(axes: list, dtype: str) -> None:
    shape, parts = tuple(n for n, _ in axes), tuple(p for _, p in axes)
    tensor = full_tensors(whole_layout({"w": (shape, dtype)}))["w"]
    shares = [row_digest(tensor[box.slices()], box, shape, "w") for box in grid(shape, parts)]
    assert sum(shares) % MOD == of_whole(tensor)


def test_a_tensor_of_many_chunks_adds_up_too() -> None:
    tensor = torch.arange(ROWS_BYTES, dtype=torch.int32).view(-1, 128)
    boxes = grid(tuple(tensor.shape), (5, 1))
    shares = [row_digest(tensor[box.slices()], box, tuple(tensor.shape), "w") for box in boxes]
    assert sum(shares) % MOD == of_whole(tensor)


@given(st.integers(0, 23), st.integers(0, 23), st.integers(0, 31))
def test_a_flipped_bit_and_a_swapped_pair_change_it(i: int, j: int, bit: int) -> None:
    tensor = torch.arange(24, dtype=torch.int32).view(4, 6)
    before = of_whole(tensor)
    flipped = tensor.clone().view(-1)
    flipped[i] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert of_whole(flipped.view(4, 6)) != before
    swapped = tensor.clone().view(-1)
    swapped[i], swapped[j] = int(tensor.view(-1)[j]), int(tensor.view(-1)[i])
    assert (of_whole(swapped.view(4, 6)) != before) == (i != j)


def test_position_name_shape_and_dtype_all_count() -> None:
    tensor = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    row = tensor[:1]
    others = [
        of_whole(tensor, "w2"),
        of_whole(tensor.t().contiguous()),
        of_whole(tensor.flip(0)),
        of_whole(tensor.flip(1)),
        of_whole(tensor.roll(1, 0)),
        of_whole(tensor.view(4, 9)),
        of_whole(tensor.view(torch.int32)),
        row_digest(row, Box((0, 0), (1, 6)), (6, 6), "w"),
        row_digest(row, Box((1, 0), (1, 6)), (6, 6), "w"),
        of_whole(tensor),
    ]
    assert len(set(others)) == len(others)
    assert of_whole(torch.zeros(3)) != row_digest(torch.zeros(2), Box((0,), (2,)), (3,), "w"), (
        "a missing zero"
    )


def test_non_contiguous_views_hash_as_their_copies() -> None:
    tensor = torch.randn(8, 10)[:, ::2]
    assert of_whole(tensor) == of_whole(tensor.contiguous())


def test_rows_longer_than_one_product_are_exact() -> None:
    """The worst sums: every byte -128. In one product they would leave int32."""
    columns = 3 * MOST_COLUMNS
    tensor = torch.full((2, columns), -128, dtype=torch.int8)
    boxes = grid((2, columns), (1, 48))
    assert sum(row_digest(tensor[b.slices()], b, (2, columns), "w") for b in boxes) % MOD == of_whole(tensor)


@given(st.integers(1, 40), st.integers(1, 20))
def test_padding_for_a_gpu_changes_no_sum(rows: int, columns: int) -> None:
    left = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    right = torch.randint(-128, 128, (columns, 8), dtype=torch.int8)
    wide, tall = _padded(left, right)
    assert wide.shape[0] > 16
    assert wide.shape[1] % 8 == 0
    assert wide.shape[1] == tall.shape[0]
    assert torch.equal(torch._int_mm(wide, tall)[:rows].long(), left.long() @ right.long())


def test_sign_bits_alone_are_seen_wherever_they_move() -> None:
    tensor = torch.ones(4, 8, dtype=torch.bfloat16)
    hashes = set()
    for i in range(32):
        moved = tensor.clone().view(-1)
        moved[i] = -1
        hashes.add(of_whole(moved.view(4, 8)))
    assert len(hashes) == 32
