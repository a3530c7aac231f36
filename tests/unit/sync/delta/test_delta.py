"""Deltas of tensors: any two come back bit for bit, and bytes that are no delta are refused."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from delta_cases import apply_delta
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sharding import same_bits

from asyncrl.errors import WireError
from asyncrl.sync.delta.delta import Changes, add, find_changes
from asyncrl.sync.delta.records import HEADER_BYTES, changes_to_bytes, deflate, join, most_bytes, read
from asyncrl.sync.layout.layout import ITEM_BYTES

ITEMS = sorted(ITEM_BYTES)


def random_bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    values = 2 if dtype == torch.bool else 256
    data = np.random.default_rng(seed).integers(0, values, count * dtype.itemsize, np.uint8)
    return torch.tensor(data).view(dtype) if count else torch.empty(0, dtype=dtype)


def header(record: torch.Tensor) -> list[int]:
    return record[:HEADER_BYTES].view(torch.int64).tolist()


def encode_delta(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The record [bytes] uint8 that makes `old` into `new`."""
    return changes_to_bytes(find_changes(old, new))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of any dtype and bits, of which any share differs, near and far."""
    dtype = getattr(torch, draw(st.sampled_from(ITEMS)))
    shape = tuple(draw(st.lists(st.integers(0, 20), max_size=3)))
    count = int(np.prod(shape))
    old = random_bits(count, dtype, draw(st.integers(0, 99)))
    new = old.clone()
    share, far = draw(st.sampled_from([0.0, 0.001, 0.1, 0.6, 1.0])), draw(st.booleans())
    changed = torch.from_numpy(np.random.default_rng(draw(st.integers(0, 99))).random(count) < share)
    bits = new.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    other = random_bits(count, dtype, draw(st.integers(100, 199))).view(bits.dtype)
    bits[changed] = other[changed] if far else bits[changed] ^ 1
    return old.view(shape), new.view(shape)


@given(pairs())
def test_any_two_tensors_come_back_bit_for_bit(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    old, new = pair
    record = encode_delta(old, new)
    staged = old.clone()
    apply_delta(staged, record)
    assert same_bits(staged, new)
    assert record.numel() % 8 == 0
    assert record.numel() <= most_bytes(new.nbytes)
    shorter = deflate(record, new.element_size())
    assert shorter.numel() % 8 == 0
    assert shorter.numel() <= record.numel()
    staged = old.clone()
    apply_delta(staged, shorter)
    assert same_bits(staged, new)


@given(pairs(), st.integers(0, 2), st.booleans())
def test_strided_views_change_nothing_beside_them(
    pair: tuple[torch.Tensor, torch.Tensor], axis: int, turned: bool
) -> None:
    old, new = pair
    assume(axis < old.dim())
    shape = list(old.shape)
    shape[axis] = 2 * shape[axis] + 3

    def inside(content: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(a larger tensor, its view that holds `content`): every other element along the axis."""
        around = torch.zeros(shape[::-1] if turned else shape, dtype=content.dtype)
        around = around.permute(*range(around.dim())[::-1]) if turned else around
        view = around[(slice(None),) * axis + (slice(2, 2 + 2 * content.shape[axis], 2),)]
        view.copy_(content)
        return around, view

    (around, staged), (expected, after) = inside(old), inside(new)
    apply_delta(staged, encode_delta(staged, after))
    assert same_bits(around, expected)


def test_the_record_by_hand() -> None:
    old = torch.zeros(1000, dtype=torch.int16)
    new = old.clone()
    new[3], new[4], new[600] = 1, -127, 1000
    record = encode_delta(old, new)
    # 3 unchanged · 0 · 595 = 2 · 255 + 85 unchanged
    assert header(record) == [5, 3, 1, -1, -1]
    assert record[40:42].view(torch.int16).tolist() == [1000]
    assert record[42:47].tolist() == [3, 0, 255, 255, 85]
    assert record[47:50].view(torch.int8).tolist() == [1, -127, -128]
    assert record.numel() == 56
    assert header(encode_delta(old, old)) == [0, 0, -1, -1, -1]


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511])
def test_gaps_around_the_escape(gap: int) -> None:
    old, new = torch.zeros(2000), torch.zeros(2000)
    new[gap] = new[2 * gap + 1] = 1.0
    staged = old.clone()
    apply_delta(staged, encode_delta(old, new))
    assert staged.nonzero().view(-1).tolist() == [gap, 2 * gap + 1]


@pytest.mark.parametrize("step", [-129, -128, -127, 127, 128])
def test_steps_around_the_mark_of_a_wide_one(step: int) -> None:
    old, new = torch.zeros(1000, dtype=torch.int16), torch.zeros(1000, dtype=torch.int16)
    new[:20], new[20] = 1, step
    staged = old.clone()
    apply_delta(staged, encode_delta(old, new))
    assert torch.equal(staged, new)


def test_changes_beyond_the_first_chunk_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.sync.delta.delta.CHUNK", 16)
    old, new = torch.zeros(50), torch.zeros(50)
    new[[3, 15, 16, 40, 49]] = 1.0
    changes = find_changes(old, new)
    assert changes.positions is not None
    assert changes.positions.tolist() == [3, 15, 16, 40, 49]


@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_an_element_that_differs_alone_in_its_word_is_found(item: int) -> None:
    """Also in the last word, which 13 elements do not fill."""
    for place in range(13):
        old = torch.zeros(13, dtype={1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[item])
        new = old.clone()
        new[place] = -5
        changes = find_changes(old, new)
        assert changes.positions is not None
        assert (changes.positions.tolist(), changes.steps.tolist()) == ([place], [-5])


def test_when_most_elements_change_positions_are_left_out() -> None:
    old = torch.arange(100, dtype=torch.int32)
    record = encode_delta(old, old + 1)
    assert header(record) == [-1, 100, 0, -1, -1]
    assert record.numel() == 40 + 100 + 4
    assert header(encode_delta(old, old + (1 << 20))) == [-1, 100, -1, -1, -1]


def test_the_share_of_bf16_weights_that_an_adamw_step_changes() -> None:
    """Weights of std 0.02, every master moved by 1e-6 either way: the usual step of RL fine-tuning."""
    torch.manual_seed(0)
    masters = 0.02 * torch.randn(1 << 20)
    moved = masters + 1e-6 * torch.randn(1 << 20).sign()
    old, new = masters.bfloat16(), moved.bfloat16()
    changes = find_changes(old, new)
    record = changes_to_bytes(changes)
    assert 0.03 < changes.steps.numel() / old.numel() < 0.05
    assert record.numel() / old.nbytes < 0.05
    assert deflate(record, 2).numel() < 0.55 * record.numel()


def test_records_lie_one_after_another() -> None:
    a, b = torch.arange(10), torch.arange(300, dtype=torch.uint8)
    records = [encode_delta(a, a + 3), encode_delta(b, b.flip(0))]
    for tensor, changes in zip((a, b), read(torch.cat(records), [(10, 8), (300, 1)]), strict=True):
        add(tensor, changes)
    assert a.tolist() == list(range(3, 13))
    assert b.tolist() == torch.arange(300, dtype=torch.uint8).flip(0).tolist()
    with pytest.raises(WireError, match="of which"):
        list(read(torch.cat([*records, torch.zeros(8, dtype=torch.uint8)]), [(10, 8), (300, 1)]))


@st.composite
def halves(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Two vectors that differ in fewer than half of their elements, and the ends of some parts of them."""
    dtype = draw(st.sampled_from([torch.int8, torch.int16, torch.int64]))
    old = torch.zeros(draw(st.integers(1, 2000)), dtype=dtype)
    new, random = old.clone(), np.random.default_rng(draw(st.integers(0, 99)))
    share = draw(st.sampled_from([0.0, 0.002, 0.05, 0.2]))
    changed = np.flatnonzero(random.random(len(old)) < share)
    new[torch.from_numpy(changed)] = torch.from_numpy(random.integers(-200, 200, len(changed))).to(dtype)
    ends = draw(st.lists(st.integers(0, len(old)), max_size=5))
    return old, new, sorted({*ends, len(old)})


@given(halves())
def test_joined_records_are_the_record_of_all_their_elements(
    given_halves: tuple[torch.Tensor, torch.Tensor, list[int]],
) -> None:
    old, new, ends = given_halves
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    records = [(encode_delta(old[part], new[part]), part.stop - part.start) for part in parts]
    joined = join(records, old.element_size())
    if joined is None:
        assert any(-1 in header(record)[::2] for record, _ in records)
        return
    whole = find_changes(old, new)
    (found,) = read(joined, [(len(old), old.element_size())])
    assert whole.positions is not None
    assert found.positions is not None
    assert torch.equal(found.positions, whole.positions)
    assert torch.equal(found.steps, whole.steps)
    assert joined.numel() <= most_bytes(new.nbytes)


def test_joined_records_by_hand() -> None:
    """Elements 2, 3 and 600 of 700, nothing in 300 more, element 5 of the last 10."""
    parts = [
        (Changes(torch.tensor([2, 3, 600]), torch.tensor([1, 1, 500], dtype=torch.int16)), 700),
        (Changes(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int16)), 300),
        (Changes(torch.tensor([5]), torch.tensor([-1], dtype=torch.int16)), 10),
    ]
    joined = join([(changes_to_bytes(changes), elements) for changes, elements in parts], 2)
    assert joined is not None
    # 2 · 0 · 596 = 2 · 255 + 86 · 99 + 300 + 5 = 255 + 149 unchanged
    assert header(joined) == [7, 4, 1, -1, -1]
    assert joined[40:42].view(torch.int16).tolist() == [500]
    assert joined[42:49].tolist() == [2, 0, 255, 255, 86, 255, 149]
    assert joined[49:53].view(torch.int8).tolist() == [1, 1, -128, -1]


def test_records_without_positions_and_with_wide_steps_alone_are_not_joined() -> None:
    every = changes_to_bytes(Changes(None, torch.ones(8, dtype=torch.int16)))
    wide = changes_to_bytes(Changes(torch.tensor([3]), torch.tensor([500], dtype=torch.int16)))
    assert join([(REGULAR, 1000), (every, 8)], 2) is None
    assert join([(REGULAR, 1000), (wide, 8)], 2) is None


def test_other_shapes_and_dtypes_have_no_delta() -> None:
    with pytest.raises(ValueError, match="against"):
        find_changes(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="against"):
        find_changes(torch.zeros(2), torch.zeros(2, dtype=torch.int32))


def with_header(record: torch.Tensor, *fields: int) -> torch.Tensor:
    return torch.cat([torch.tensor(fields).view(torch.uint8), record[HEADER_BYTES:]])


SPARSE = changes_to_bytes(Changes(torch.tensor([2, 900]), torch.tensor([1, 500], dtype=torch.int16)))
REGULAR = changes_to_bytes(Changes(torch.arange(0, 1000, 4), torch.ones(250, dtype=torch.int16)))
DEFLATED = deflate(REGULAR, 2)
"""Gaps from byte 40 on: the checksum of each part is its end."""
AT = header(DEFLATED)[3:]
END = HEADER_BYTES + sum(AT)


def bomb(size: int) -> torch.Tensor:
    """A record whose 250 gaps are `size` zeros once inflated."""
    return with_gaps(zlib.compress(bytes(size)))


def with_gaps(data: bytes) -> torch.Tensor:
    """A record of 250 narrow steps, as they are, and of these deflated gaps."""
    gaps, narrow = torch.frombuffer(bytearray(data), dtype=torch.uint8), torch.ones(250, dtype=torch.uint8)
    parts = [torch.tensor([250, 250, 0, len(data), -1]).view(torch.uint8), gaps, narrow]
    return torch.cat([*parts, torch.zeros(-sum(map(len, parts)) % 8, dtype=torch.uint8)])


def flipped(record: torch.Tensor, at: int) -> torch.Tensor:
    record = record.clone()
    record[at] ^= 1
    return record


def test_parts_that_are_shorter_are_deflated_by_hand() -> None:
    assert header(REGULAR) == [250, 250, 0, -1, -1]
    assert 0 < header(DEFLATED)[3] < 60
    assert 0 < header(DEFLATED)[4] < 60
    assert zlib.decompress(DEFLATED[40:].numpy().data) == bytes([0] + [3] * 249)
    assert torch.equal(deflate(SPARSE, 2), SPARSE), "two gaps take more bytes when deflated"
    staged = torch.zeros(1000, dtype=torch.int16)
    apply_delta(staged, DEFLATED)
    assert staged[::4].eq(1).all()
    assert staged.sum() == 250


@pytest.mark.parametrize(
    "record",
    [
        SPARSE[:16],
        SPARSE[:-8],
        torch.cat([SPARSE, SPARSE[:8]]),
        with_header(SPARSE, 5, 2, 3, -1, -1),
        with_header(SPARSE, 4, 2, 1, -1, -1),
        with_header(SPARSE, 5, 3, 1, -1, -1),
        with_header(SPARSE, 5, -2, 1, -1, -1),
        with_header(SPARSE, -2, 2, 1, -1, -1),
        with_header(SPARSE, -1, 2, 1, -1, -1),
        with_header(SPARSE, 1 << 62, 1 << 62, 1 << 62, -1, -1),
        with_header(SPARSE, *header(SPARSE)[:3], -2, -1),
        with_header(SPARSE, *header(SPARSE)[:3], 1 << 62, -1),
        with_header(SPARSE, *header(SPARSE)[:3], header(SPARSE)[0], -1),
        with_header(REGULAR, 250, 250, 0, 0, 0),
        with_header(DEFLATED, 250, 250, 0, AT[0], AT[1] - 1),
        with_header(DEFLATED, 250, 250, 0, AT[0] - 1, AT[1]),
        with_header(DEFLATED, 249, 249, 0, *AT),
        flipped(DEFLATED, HEADER_BYTES),
        flipped(DEFLATED, HEADER_BYTES + AT[0] - 1),
        flipped(DEFLATED, END - 1),
        bomb(249),
        bomb(251),
        with_gaps(zlib.compress(bytes(250)) + b"x"),
        with_gaps(zlib.compress(bytes(250), level=0)),  # longer than the gaps as they are
        changes_to_bytes(Changes(torch.tensor([2, 1000]), torch.tensor([1, 500], dtype=torch.int16))),
        changes_to_bytes(Changes(None, torch.ones(999, dtype=torch.int16))),
    ],
)
def test_what_is_no_delta_of_this_tensor_is_refused_and_changes_nothing(record: torch.Tensor) -> None:
    staged = torch.zeros(1000, dtype=torch.bfloat16)
    with pytest.raises(WireError):
        apply_delta(staged, record)
    assert not staged.any()


def test_no_more_is_inflated_than_there_can_be() -> None:
    with pytest.raises(WireError, match="of 251 bytes once inflated, not 250"):
        apply_delta(torch.zeros(1000, dtype=torch.bfloat16), bomb(200_000))
    staged = torch.zeros(1000, dtype=torch.int16)
    apply_delta(staged, bomb(250))
    assert staged.tolist() == [1] * 250 + [0] * 750


@given(arrays(np.uint8, st.integers(0, 80)), st.lists(st.integers(-2, 40), min_size=5, max_size=5))
def test_any_bytes_are_a_delta_or_refused(body: np.ndarray, fields: list[int]) -> None:
    record = torch.cat([torch.tensor(fields).view(torch.uint8), torch.from_numpy(body.copy())])
    around = torch.zeros(64, dtype=torch.int32)
    try:
        apply_delta(around[8:40], record)
    except WireError:
        assert not around.any()
    assert not around[:8].any()
    assert not around[40:].any()
