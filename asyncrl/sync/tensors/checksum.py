"""The checksum of a version, made by the learner and compared with the parameters that an engine runs on.

    learner ranks ── ChecksumShare: by, value ──▸ sum ─▸ Checksum ── check(live parameters) ──▸ WeightSyncError

There are two hashes: one is fast on the CPU, one on a GPU. A share records which one made it (`by`). Both are sums mod
2^64 over pieces, and neither is cryptographic: they find lost, torn, swapped and stale bytes, not forged ones.

by pieces    Σ XXH3(bytes of a piece; seed: its name, full shape, dtype and box)         (Collet 2019)

It hashes tensors in host memory as fast as they can be read; both ends have the plan, and so the pieces.

by rows      H(r) = Σ_k B_k · Σ_c b(r, c) · T_k(c)              k = 0..7, exact integers
             P_p · Σ_r A(r) · (H(r) + n · N)

A parameter p is a matrix of bytes: its last axis makes the columns, all others together the rows; b(r, c), read as
signed, is the byte at row r and column c, n the elements in a row of the box. T_k in [-128, 127] without 0, and A, B_k,
N and P_p of 64 bits are all pseudo-random: multilinear hashing (Carter & Wegman 1979), keyed by parameter and position.
The hash is the same for every cut into boxes, and another for any other difference: n makes a missing element differ
from a zero; a swapped pair, a wrong offset, a transposed matrix or a value under another name changes it.

The inner sum is one product of int8 matrices, for which GPUs have instructions, and CPUs too: there it takes about
four times as long as a copy. All other sums are elementwise products and `sum` of int64, which wrap as mod 2^64 does;
CUDA has no dot of integers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import xxhash
from torch.nn.functional import pad

from asyncrl.device import accelerator
from asyncrl.errors import WeightSyncError
from asyncrl.sync.layout.layout import Box
from asyncrl.sync.plan.plan import Piece
from asyncrl.sync.tensors.shards import Shards, dtype_name, flat_bytes

MOD = 1 << 64

ROWS, PIECES = "rows", "pieces"

CHUNK_BYTES = 1 << 20
"""Bytes of a piece with gaps in memory that are made contiguous at once."""

ROWS_BYTES = 1 << 21
"""Bytes hashed by rows at once on a CPU: intermediate results stay in the cache."""

DEVICE_BYTES, DEVICE_ROWS = 1 << 26, 1 << 18
"""Bytes and rows hashed at once on an accelerator: few launches, and 50 MB of intermediate results."""

KEY_BYTES = 1 << 26
"""Bytes of keys that a hash keeps for further tensors of the same sizes."""

COUNTED = 0xA0761D6478BD642F
"""N: an element adds this besides its value."""

LANES = 8
"""Terms of the inner sum: T_0 to T_7."""

MOST_COLUMNS = 1 << 16
"""Bytes of a row in one product: their sum of |b · T| ≤ 2^14 each stays within int32."""


class ChecksumShare(NamedTuple):
    """The hash of one rank's part. by: ROWS or PIECES."""

    by: str
    value: int

    @staticmethod
    def of(pieces: Iterable[Piece], shards: Shards) -> ChecksumShare:
        """The hash of tensors as they are now, by the way that is fast on their device."""
        by = PIECES if shards.device.type == "cpu" else ROWS
        return ChecksumShare(by, hash_of(by, pieces, shards))

    @staticmethod
    def from_wire(value: Any) -> ChecksumShare | None:
        """A share in a message; None if the sender made no hash. Raises WeightSyncError for anything else."""
        if value is None:
            return None
        match value:
            case [str(by), int(number)] if by in (ROWS, PIECES) and 0 <= number < MOD:
                return ChecksumShare(by, number)
        raise WeightSyncError(f"not the hash of a version: {value!r}")


@dataclass(frozen=True, slots=True)
class Checksum:
    """The checksum of a whole version. pieces: those of all ranks."""

    share: ChecksumShare
    pieces: tuple[Piece, ...]

    @staticmethod
    def joined(shares: Sequence[ChecksumShare | None], pieces: Iterable[Piece]) -> Checksum | None:
        """The sum of all senders' shares; None if some have none. Raises WeightSyncError for shares of both kinds."""
        known = [share for share in shares if share is not None]
        if len(known) < len(shares):
            return None
        ways = {share.by for share in known} or {PIECES}  # no pieces: the empty sum
        if len(ways) > 1:
            raise WeightSyncError("some learner ranks hash by rows, others by pieces")
        return Checksum(ChecksumShare(ways.pop(), sum(share.value for share in known) % MOD), tuple(pieces))

    def holds(self, shards: Shards) -> bool:
        """Whether these tensors have this hash."""
        return hash_of(self.share.by, self.pieces, shards) == self.share.value

    def check(self, shards: Shards, whose: str) -> None:
        """Raise WeightSyncError unless it holds. whose: tensors, for the message."""
        if not self.holds(shards):
            raise WeightSyncError(f"{whose} do not hash to {self.share.value:016x}, as the learner's do")


def hash_of(by: str, pieces: Iterable[Piece], shards: Shards) -> int:
    """In [0, 2^64). Raises WeightSyncError for pieces that are not held."""
    if by == PIECES:
        return sum(_piece_hash(piece, shards) for piece in pieces) % MOD
    rows = RowHash(shards.device)
    for piece in pieces:
        rows.add(shards.view(piece.name, piece.box), piece.box, shards.layout[piece.name].shape, piece.name)
    return rows.value()


def hash_of_all(shards: Shards) -> int:
    """In [0, 2^64), of all elements that are held, by the way that is fast on their device."""
    pieces = (
        Piece(name, box, 0, box.elements * part.element_size())
        for name, parts in shards.tensors.items()
        for box, part in zip(shards.layout[name].boxes, parts, strict=True)
    )
    return ChecksumShare.of(pieces, shards).value


@lru_cache(maxsize=1 << 16)
def _seed(name: str, box: Box, shape: tuple[int, ...], dtype: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{name}|{shape}|{dtype}|{box.offsets}|{box.shape}".encode())


def _piece_hash(piece: Piece, shards: Shards) -> int:
    param = shards.layout[piece.name]
    seed = _seed(piece.name, piece.box, param.shape, param.dtype)
    values = shards.view(piece.name, piece.box)
    if values.is_contiguous():
        return xxhash.xxh3_64_intdigest(_memory(values), seed)
    state = xxhash.xxh3_64(seed=seed)
    for part in values.split(max(1, len(values) * CHUNK_BYTES // piece.bytes)):
        state.update(_memory(part.contiguous()))
    return state.intdigest()


def _memory(tensor: torch.Tensor) -> memoryview:
    return flat_bytes(tensor).cpu().numpy().data


def row_digest(tensor: torch.Tensor, box: Box, shape: tuple[int, ...], name: str) -> int:
    """The share, in [0, 2^64), of `tensor`: the elements in `box` of the parameter `name` of full `shape`."""
    rows = RowHash(tensor.device)
    rows.add(tensor, box, shape, name)
    return rows.value()


class RowHash:
    """The hash by rows of tensors on one device. The sum stays there: `value` alone waits for the device.

    One thread's: the keys are made on the stream that uses them, and freed with the hash.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._fast = device, accelerator.is_accelerator(device)
        self._sum = torch.zeros((), dtype=torch.int64, device=device)
        self._lanes_K = _row_keys((0,), (LANES,), (LANES,), device)
        self._keys: dict[tuple[object, ...], torch.Tensor] = {}

    def add(self, tensor: torch.Tensor, box: Box, shape: tuple[int, ...], name: str) -> None:
        """Add `tensor`: the elements in `box` of the parameter `name` of full `shape`."""
        if not tensor.numel():
            return
        # A scalar is one row of one column, a vector one row.
        offsets, sizes, full = (
            ((0, *box.offsets), (1, *box.shape), (1, *shape)) if shape else ((0, 0), (1, 1), (1, 1))
        )
        item = tensor.element_size()
        row_keys_R = self._kept(_row_keys, offsets[:-1], sizes[:-1], full[:-1])
        keys_CK = self._kept(_column_keys, offsets[-1] * item, sizes[-1] * item)
        values_RC = tensor.detach().reshape(-1, sizes[-1])
        total = row_keys_R.sum() * _signed(sizes[-1] * COUNTED % MOD)
        step = self._rows_at_once(sizes[-1] * item)
        for start in range(0, len(row_keys_R), step):
            at = slice(start, start + step)
            sums_R = self._row_sums(values_RC[at].contiguous().view(torch.int8), keys_CK)
            total += (sums_R * row_keys_R[at]).sum()
        self._sum += total * _signed(_name_key(name, shape, dtype_name(tensor.dtype)))

    def value(self) -> int:
        """In [0, 2^64). Waits until the device has all of it."""
        return int(self._sum) % MOD

    def _rows_at_once(self, row_bytes: int) -> int:
        if not self._fast:
            return max(1, ROWS_BYTES // row_bytes)
        return max(32, min(DEVICE_ROWS, DEVICE_BYTES // row_bytes) // 32 * 32)

    def _kept(self, make: Callable[..., torch.Tensor], *numbers: object) -> torch.Tensor:
        """The keys that `make` makes of these numbers."""
        key = (make, *numbers)
        if (found := self._keys.get(key)) is None:
            found = make(*numbers, self._device)
            if sum(keys.nbytes for keys in self._keys.values()) + found.nbytes > KEY_BYTES:
                self._keys.clear()
            self._keys[key] = found
        return found

    def _row_sums(self, bytes_RC: torch.Tensor, keys_CK: torch.Tensor) -> torch.Tensor:
        """[R] int64: H of each row."""
        rows, columns = bytes_RC.shape
        sums_R = torch.zeros(rows, dtype=torch.int64, device=self._device)
        for start in range(0, columns, MOST_COLUMNS):
            at = slice(start, start + MOST_COLUMNS)
            left_RC = _padded(bytes_RC[:, at]) if self._fast else bytes_RC[:, at]
            sums_R += (torch._int_mm(left_RC, keys_CK[at])[:rows] * self._lanes_K).sum(1)
        return sums_R


def _padded(bytes_RC: torch.Tensor) -> torch.Tensor:
    """In one stretch of memory, with zeros to 32 rows or more and to a multiple of eight columns: `_int_mm` on CUDA
    demands them."""
    rows, columns = bytes_RC.shape
    return pad(bytes_RC, (0, -columns % 8, 0, max(0, 32 - rows))).contiguous()


def _name_key(name: str, shape: tuple[int, ...], dtype: str) -> int:
    text = f"{name}|{shape}|{dtype}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1


def _row_keys(
    offsets: tuple[int, ...], sizes: tuple[int, ...], full: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """[R] int64, odd: the keys of a box's rows, in its order."""
    numbers = torch.zeros((), dtype=torch.int64, device=device)
    for offset, size, length in zip(offsets, sizes, full, strict=True):
        along = torch.arange(offset, offset + size, dtype=torch.int64, device=device)
        numbers = (numbers * length).unsqueeze(-1) + along
    return _mixed(numbers.reshape(-1) * _signed(0x9E3779B97F4A7C15) + 1) | 1


def _column_keys(first: int, columns: int, device: torch.device) -> torch.Tensor:
    """[columns, LANES] int8, none of them 0: one 64-bit number for each column.

    On an accelerator up to a multiple of eight columns, and each lane whole in memory: from CUDA 13 on cuBLAS has no
    product of int8 matrices that are both stored by rows.
    """
    if not accelerator.is_accelerator(device):
        return _host_column_keys(first, columns)
    return _mixed_columns(first, columns + -columns % 8, device).t().contiguous().t()


@lru_cache(maxsize=64)
def _host_column_keys(first: int, columns: int) -> torch.Tensor:
    """See `_column_keys`."""
    return _mixed_columns(first, columns, accelerator.CPU)


def _mixed_columns(first: int, columns: int, device: torch.device) -> torch.Tensor:
    numbers = torch.arange(first, first + columns, dtype=torch.int64, device=device)
    keys_CK = _mixed(numbers * _signed(0xD1342543DE82EF95) + 1).view(torch.int8).view(columns, LANES)
    return keys_CK | (keys_CK == 0)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele et al. 2014); torch's int64 wraps, its >> keeps the sign."""
    values = (values ^ ((values >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ ((values >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return values ^ ((values >> 31) & ((1 << 33) - 1))


def _signed(value: int) -> int:
    return value - MOD if value >= MOD >> 1 else value
