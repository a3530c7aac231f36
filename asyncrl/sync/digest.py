"""A hash of parameters that does not care how they are cut into boxes, and does care about everything else.

For an element with bits b (as an integer of its width) at row r and column c of the parameter p, where the
columns are the last axis and the rows all others flattened,

    digest = Σ (b + 1) · (A_p(r) · T(c) + C_p(r))   mod 2^64

with T, A_p, C_p pseudo-random 64-bit numbers: multilinear hashing (Carter & Wegman 1979), keyed by parameter
and position. It is a sum, so ranks add up their boxes in any order; the +1 makes a missing element differ
from a zero. A swapped pair, a wrong offset, a transposed matrix or a value under another name changes it. Not
cryptographic.

Two multiplications an element, in chunks: as fast as a few passes over the memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import torch

from asyncrl.sync.bucket import Shards, dtype_name
from asyncrl.sync.layout import Box, Layout
from asyncrl.sync.plan import SourcePlan

MOD = 1 << 64
CHUNK = 1 << 18
"""Elements hashed at once: their 64-bit images stay in the cache."""

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor, box: Box, shape: tuple[int, ...], name: str) -> int:
    """The share, in [0, 2^64), of `tensor`: the elements in `box` of the parameter `name` of full `shape`."""
    if not tensor.numel():
        return 0
    # A scalar is one row of one column, a vector one row.
    offsets, sizes, full = (
        ((0, *box.offsets), (1, *box.shape), (1, *shape)) if shape else ((0, 0), (1, 1), (1, 1))
    )
    rows_R = _row_numbers(offsets[:-1], sizes[:-1], full[:-1], tensor.device)
    row_keys_R, row_adds_R = _row_keys(rows_R, _key(name, shape, dtype_name(tensor.dtype)))
    columns_C = _column_keys(full[-1], tensor.device)[offsets[-1] : offsets[-1] + sizes[-1]]
    values_RC = tensor.detach().reshape(-1, sizes[-1])
    step = max(1, CHUNK // sizes[-1])
    total = 0
    for start in range(0, len(rows_R), step):
        at = slice(start, start + step)
        bits_RC = values_RC[at].contiguous().view(BITS[tensor.element_size()]).to(torch.int64) + 1
        sums_R = (bits_RC * columns_C).sum(1) * row_keys_R[at] + bits_RC.sum(1) * row_adds_R[at]
        total += int(sums_R.sum())
    return total % MOD


def digest_layout(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> int:
    """Of everything a layout holds, e.g. an engine's live parameters. WeightSyncError for a misfit."""
    shards = Shards(layout, tensors)
    return sum(_of(shards, name, box) for name, param in layout.items() for box in param.boxes) % MOD


def digest_source(source: SourcePlan, shards: Shards) -> int:
    """Of exactly what a learner rank sends to one destination; the ranks' add up to the destination's."""
    return sum(_of(shards, piece.name, piece.box) for piece in source.pieces) % MOD


def _of(shards: Shards, name: str, box: Box) -> int:
    return digest(shards.view(name, box), box, shards.layout[name].shape, name) if box.elements else 0


def _key(name: str, shape: tuple[int, ...], dtype: str) -> int:
    text = f"{name}|{shape}|{dtype}".encode()
    return _signed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))


def _row_numbers(
    offsets: tuple[int, ...], sizes: tuple[int, ...], full: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """[R] int64: of each row of the box, its number in the whole parameter."""
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for offset, size, length in zip(offsets, sizes, full, strict=True):
        along = torch.arange(offset, offset + size, dtype=torch.int64, device=device)
        rows = (rows[:, None] * length + along).reshape(-1)
    return rows


def _row_keys(rows_R: torch.Tensor, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys_R = _mixed(rows_R * _signed(0x9E3779B97F4A7C15) + key)
    return keys_R | 1, _mixed(keys_R + 1)


@lru_cache(maxsize=64)
def _column_keys(columns: int, device: torch.device) -> torch.Tensor:
    return (
        _mixed(torch.arange(columns, dtype=torch.int64, device=device) * _signed(0xD1342543DE82EF95) + 1) | 1
    )


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele et al. 2014); torch's int64 wraps, its >> keeps the sign."""
    values = (values ^ ((values >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ ((values >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return values ^ ((values >> 31) & ((1 << 33) - 1))


def _signed(value: int) -> int:
    return value - MOD if value >= MOD >> 1 else value
