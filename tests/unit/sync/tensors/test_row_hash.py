from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
import torch
from cuda_ops import NotOnCudaError
from hypothesis import given, settings
from hypothesis import strategies as st
from pretended_gpu import GPU, PretendedGpu
from sharding import DTYPES, full_tensors, grid

import asyncrl.sync.tensors.checksum as checksum
from asyncrl.sync.layout.layout import Box, whole_layout
from asyncrl.sync.plan.plan import plan
from asyncrl.sync.tensors.checksum import (
    COUNTED,
    MOD,
    MOST_COLUMNS,
    ROWS,
    ROWS_BYTES,
    ChecksumShare,
    RowHash,
    hash_of,
    row_digest,
)
from asyncrl.sync.tensors.shards import Shards


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


def by_definition(tensor: torch.Tensor, box: Box, shape: tuple[int, ...], name: str) -> int:
    """The sum in the head of checksum.py, in Python's integers."""

    def mixed(number: int) -> int:
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % MOD
        number = (number ^ number >> 27) * 0x94D049BB133111EB % MOD
        return number ^ number >> 31

    def row_key(row: int) -> int:
        return mixed((row * 0x9E3779B97F4A7C15 + 1) % MOD) | 1

    item, total = tensor.element_size(), 0
    values = tensor.contiguous().view(-1, box.shape[-1]).view(torch.int8).tolist()
    for row, index in zip(values, np.ndindex(box.shape[:-1]), strict=True):
        at = np.ravel_multi_index(np.add(index, box.offsets[:-1]), shape[:-1]) if index else 0
        total += row_key(int(at)) * box.shape[-1] * COUNTED
        for column, byte in enumerate(row, start=box.offsets[-1] * item):
            word = mixed((column * 0xD1342543DE82EF95 + 1) % MOD)
            for lane, key in enumerate(struct.unpack("<8b", word.to_bytes(8, "little"))):
                total += row_key(int(at)) * row_key(lane) * byte * (key or 1)
    text = f"{name}|{shape}|{str(tensor.dtype).removeprefix('torch.')}".encode()
    return total * (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1) % MOD


@settings(max_examples=10)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
)
def test_the_cpu_and_a_gpu_compute_the_definition(axes: list, dtype: str) -> None:
    box = Box(tuple(low for low, _, _ in axes), tuple(size for _, size, _ in axes))
    shape = tuple(sum(axis) for axis in axes)
    tensor = full_tensors(whole_layout({"w": (shape, dtype)}))["w"][box.slices()]
    expected = by_definition(tensor, box, shape, "w")
    assert row_digest(tensor, box, shape, "w") == expected
    with PretendedGpu() as gpu:
        assert row_digest(gpu.tensor(tensor), box, shape, "w") == expected


def test_a_gpu_is_waited_for_once_in_a_share() -> None:
    layout = whole_layout({f"p{i}": ((40 + i, 37), "bfloat16") for i in range(9)})
    tensors = full_tensors(layout)
    (source,) = plan([layout], layout, 1 << 12).sources
    with PretendedGpu() as gpu:
        there = Shards(layout, {name: gpu.tensor(tensor) for name, tensor in tensors.items()})
        share = ChecksumShare.of(source.pieces, there)
        assert [wait.split()[0] for wait in gpu.waits] == ["_local_scalar_dense"]
        assert gpu.uploads == []
    assert share == ChecksumShare(ROWS, hash_of(ROWS, source.pieces, Shards(layout, tensors)))


def test_the_sums_before_did_not_exist_on_a_gpu() -> None:
    """Kept so that the proof is one: an int64 dot, and a product of int8 matrices that are both stored by rows."""
    with PretendedGpu():
        bytes_rc, keys_ck, row_keys_r = (
            torch.ones(n, device="cuda").long() for n in ((32, 8), (8, 8), (32,))
        )
        with pytest.raises(NotOnCudaError, match="columns of the right lie whole"):
            torch._int_mm(bytes_rc.to(torch.int8), keys_ck.to(torch.int8))
        with pytest.raises(NotOnCudaError, match="dot"):
            bytes_rc.sum(1).dot(row_keys_r)


def test_chunks_of_a_gpu_add_up_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in thirty-twos, so that each chunk begins at a multiple of eight bytes; keys are dropped beyond a limit."""
    monkeypatch.setattr(checksum, "DEVICE_BYTES", 40 * 6)
    monkeypatch.setattr(checksum, "MOST_COLUMNS", 8)
    monkeypatch.setattr(checksum, "KEY_BYTES", 300)
    tensor = torch.arange(100 * 5, dtype=torch.int16).view(100, 5)
    with PretendedGpu() as gpu:
        rows = RowHash(GPU)
        for name in ("a", "b"):
            rows.add(gpu.tensor(tensor), Box.whole((100, 5)), (100, 5), name)
        assert sum(keys.nbytes for keys in rows._keys.values()) <= 300
        assert rows.value() == (of_whole(tensor, "a") + of_whole(tensor, "b")) % MOD


def test_sign_bits_alone_are_seen_wherever_they_move() -> None:
    tensor = torch.ones(4, 8, dtype=torch.bfloat16)
    hashes = set()
    for i in range(32):
        moved = tensor.clone().view(-1)
        moved[i] = -1
        hashes.add(of_whole(moved.view(4, 8)))
    assert len(hashes) == 32
