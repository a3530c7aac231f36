"""A hash of parameters by rows: the same for every cut into boxes, and another for any other difference.

A parameter is a matrix of bytes: its last axis makes the columns, all others together the rows. With the byte b,
read as signed, at row r and column c of the parameter p, and n elements in a row of the box,

    row sum   H(r) = Σ_k B_k · Σ_c b(r, c) · T_k(c)              k = 0..7, exact integers
    digest    P_p · Σ_r A(r) · (H(r) + n · N)   mod 2^64

with T_k in [-128, 127] without 0, and A, B_k, N and P_p 64 bits, all pseudo-random: multilinear hashing (Carter &
Wegman 1979), keyed by parameter and position. It is a sum, so ranks add up their boxes in any order; n makes a
missing element differ from a zero. A swapped pair, a wrong offset, a transposed matrix or a value under another name
changes it. Not cryptographic.

The inner sum is one product of int8 matrices, for which GPUs have instructions, and CPUs too: there it takes about
four times as long as a copy. `checksum.py` has a faster hash for ends that agree on the pieces.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch.nn.functional import pad

from asyncrl.sync.layout.layout import Box
from asyncrl.sync.plan.plan import Piece
from asyncrl.sync.tensors.bucket import Shards, dtype_name

MOD = 1 << 64
CHUNK_BYTES = 1 << 21
"""Hashed at once."""

COUNTED = 0xA0761D6478BD642F
"""N: an element adds this besides its value."""

LANES = 8
"""Terms of the inner sum: T_0 to T_7."""

MOST_COLUMNS = 1 << 16
"""Bytes of a row in one product: their sum of |b · T| ≤ 2^14 each stays within int32."""


def row_digest(tensor: torch.Tensor, box: Box, shape: tuple[int, ...], name: str) -> int:
    """The share, in [0, 2^64), of `tensor`: the elements in `box` of the parameter `name` of full `shape`."""
    if not tensor.numel():
        return 0
    # A scalar is one row of one column, a vector one row.
    offsets, sizes, full = (
        ((0, *box.offsets), (1, *box.shape), (1, *shape)) if shape else ((0, 0), (1, 1), (1, 1))
    )
    item = tensor.element_size()
    row_keys_R = _box_rows(
        _row_keys(math.prod(full[:-1]), tensor.device), offsets[:-1], sizes[:-1], full[:-1]
    )
    keys_CK = _column_keys(full[-1] * item, tensor.device)[offsets[-1] * item :][: sizes[-1] * item]
    values_RC = tensor.detach().reshape(-1, sizes[-1])
    step = max(1, CHUNK_BYTES // (sizes[-1] * item))
    total = int(row_keys_R.sum()) * sizes[-1] * COUNTED
    for start in range(0, len(row_keys_R), step):
        at = slice(start, start + step)
        sums_R = _row_sums(values_RC[at].contiguous().view(torch.int8), keys_CK)
        total += int(sums_R.dot(row_keys_R[at]))
    return total * _name_key(name, shape, dtype_name(tensor.dtype)) % MOD


def digest_pieces(pieces: Iterable[Piece], shards: Shards) -> int:
    """The digest of some pieces of a rank. Raises WeightSyncError for those that are not held."""
    return (
        sum(
            row_digest(shards.view(p.name, p.box), p.box, shards.layout[p.name].shape, p.name) for p in pieces
        )
        % MOD
    )


def _name_key(name: str, shape: tuple[int, ...], dtype: str) -> int:
    text = f"{name}|{shape}|{dtype}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1


def _box_rows(
    keys_R: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...], full: tuple[int, ...]
) -> torch.Tensor:
    """The keys of the box's rows, in its order."""
    return keys_R.view(full)[tuple(map(slice, offsets, map(operator.add, offsets, sizes)))].reshape(-1)


def _row_sums(bytes_RC: torch.Tensor, keys_CK: torch.Tensor) -> torch.Tensor:
    """[R] int64: H of each row."""
    lanes_K = _row_keys(LANES, bytes_RC.device)
    sums_R = torch.zeros(len(bytes_RC), dtype=torch.int64, device=bytes_RC.device)
    for start in range(0, bytes_RC.shape[1], MOST_COLUMNS):
        at = slice(start, start + MOST_COLUMNS)
        sums_R += (_product(bytes_RC[:, at], keys_CK[at]).to(torch.int64) * lanes_K).sum(1)
    return sums_R


def _product(left_RC: torch.Tensor, right_CK: torch.Tensor) -> torch.Tensor:
    """[R, K] int32 of int8 matrices, exact."""
    rows = len(left_RC)
    if left_RC.device.type == "cuda":  # wants more than 16 rows, and columns in eights
        left_RC, right_CK = _padded(left_RC, right_CK)
    return torch._int_mm(left_RC, right_CK)[:rows]


def _padded(left_RC: torch.Tensor, right_CK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With zeros, to 32 rows or more and to a multiple of eight columns."""
    rows, columns = left_RC.shape
    more = -columns % 8
    return pad(left_RC, (0, more, 0, max(0, 32 - rows))), pad(right_CK, (0, 0, 0, more))


@lru_cache(maxsize=64)
def _row_keys(rows: int, device: torch.device) -> torch.Tensor:
    """[rows] int64, odd."""
    return _mixed(torch.arange(rows, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15) + 1) | 1


@lru_cache(maxsize=64)
def _column_keys(columns: int, device: torch.device) -> torch.Tensor:
    """[columns, LANES] int8, none of them 0: one 64-bit number for each column."""
    words_C = _mixed(
        torch.arange(columns, dtype=torch.int64, device=device) * _signed(0xD1342543DE82EF95) + 1
    )
    keys_CK = words_C.view(torch.int8).view(columns, LANES)
    return torch.where(keys_CK == 0, 1, keys_CK)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele et al. 2014); torch's int64 wraps, its >> keeps the sign."""
    values = (values ^ ((values >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ ((values >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return values ^ ((values >> 31) & ((1 << 33) - 1))


def _signed(value: int) -> int:
    return value - MOD if value >= MOD >> 1 else value
