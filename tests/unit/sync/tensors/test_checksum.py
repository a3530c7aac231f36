from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharding import full_tensors

from asyncrl.errors import WeightSyncError
from asyncrl.sync.layout.layout import whole_layout
from asyncrl.sync.plan.plan import plan
from asyncrl.sync.tensors.checksum import PIECES, ROWS, Checksum, ChecksumShare, hash_of
from asyncrl.sync.tensors.shards import Shards

LAYOUT = whole_layout({"a": ((3, 4), "float32"), "b": ((), "bfloat16"), "c": ((3, 4), "float32")})
WAYS = pytest.mark.parametrize("by", [ROWS, PIECES])


def checksum_of(tensors: dict[str, torch.Tensor], by: str) -> Checksum:
    (source,) = plan([LAYOUT], LAYOUT, 1 << 20).sources
    return Checksum(
        ChecksumShare(by, hash_of(by, source.pieces, Shards(LAYOUT, tensors))), tuple(source.pieces)
    )


@WAYS
@given(st.sampled_from(["a", "b", "c"]), st.integers(0, 47), st.integers(1, 255))
def test_one_wrong_byte_anywhere_is_found(by: str, name: str, at: int, change: int) -> None:
    tensors = full_tensors(LAYOUT)
    checksum = checksum_of(tensors, by)
    assert checksum.holds(Shards(LAYOUT, tensors))
    memory = tensors[name].view(-1).view(torch.uint8)
    memory[at % len(memory)] ^= change
    with pytest.raises(WeightSyncError, match=r"ours do not hash to [0-9a-f]{16}, as the learner's do"):
        checksum.check(Shards(LAYOUT, tensors), "ours")


@WAYS
def test_two_parameters_that_are_swapped_are_found(by: str) -> None:
    tensors = full_tensors(LAYOUT)
    checksum = checksum_of(tensors, by)
    assert not checksum.holds(Shards(LAYOUT, {**tensors, "a": tensors["c"], "c": tensors["a"]}))


def test_pieces_with_gaps_in_memory_hash_as_their_copies() -> None:
    layout = whole_layout({"w": ((3000, 500), "bfloat16")})  # several chunks
    wide = torch.randn(3000, 1000).bfloat16()
    (source,) = plan([layout], layout, 1 << 30).sources
    gaps, copied = (Shards(layout, {"w": w}) for w in (wide[:, ::2], wide[:, ::2].contiguous()))
    assert hash_of(PIECES, source.pieces, gaps) == hash_of(PIECES, source.pieces, copied)


def test_what_is_in_host_memory_is_hashed_by_pieces() -> None:
    (source,) = plan([LAYOUT], LAYOUT, 1 << 20).sources
    assert ChecksumShare.of(source.pieces, Shards(LAYOUT, full_tensors(LAYOUT))).by == PIECES


def test_shares_are_joined_if_all_are_there_and_of_one_kind() -> None:
    assert Checksum.joined([ChecksumShare(ROWS, 7), ChecksumShare(ROWS, (1 << 64) - 2)], ()) == Checksum(
        ChecksumShare(ROWS, 5), ()
    )
    assert Checksum.joined([ChecksumShare(ROWS, 7), None], ()) is None
    assert Checksum.joined([], ()) == Checksum(ChecksumShare(PIECES, 0), ())
    with pytest.raises(WeightSyncError, match="some learner ranks hash by rows, others by pieces"):
        Checksum.joined([ChecksumShare(ROWS, 7), ChecksumShare(PIECES, 7)], ())


@pytest.mark.parametrize(
    "value", [7, [7], ["rows", -1], ["rows", 1 << 64], ["sha", 3], ["rows", "3"], [None, 1]]
)
def test_what_is_no_share_is_refused(value: object) -> None:
    with pytest.raises(WeightSyncError, match="not the hash of a version"):
        ChecksumShare.from_wire(value)


def test_a_share_survives_the_wire() -> None:
    assert ChecksumShare.from_wire([PIECES, 3]) == ChecksumShare(PIECES, 3)
    assert ChecksumShare.from_wire(None) is None
