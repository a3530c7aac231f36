"""The checksum of a version, made by the learner and compared with the parameters that an engine runs on.

    learner ranks ── ChecksumShare: by, value ──▸ sum ─▸ Checksum ── check(live parameters) ──▸ WeightSyncError

Two hashes, each for the memory where it is fast; a share has the name of its own.

    by pieces    Σ XXH3(bytes of a piece; seed: its name, full shape, dtype and box)   mod 2^64
                 of tensors in host memory, as fast as they can be read; both ends have the plan, and so the pieces
    by rows      `row_hash.py`: a product of matrices, for tensors on a GPU

XXH3 (Collet 2019) is not cryptographic: it finds lost, torn, swapped and stale bytes, not forged ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import xxhash

from asyncrl.errors import WeightSyncError
from asyncrl.sync.layout.layout import Box
from asyncrl.sync.plan.plan import Piece
from asyncrl.sync.tensors.bucket import Shards, flat_bytes
from asyncrl.sync.tensors.row_hash import MOD, digest_pieces

ROWS, PIECES = "rows", "pieces"

CHUNK_BYTES = 1 << 20
"""Bytes of a piece with gaps in memory that are made contiguous at once."""


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
    if by == ROWS:
        return digest_pieces(pieces, shards)
    return sum(_piece_hash(piece, shards) for piece in pieces) % MOD


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
