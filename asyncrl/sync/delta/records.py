"""The bytes of changes, as few as possible.

    Changes ─┬ positions ─▸ gaps, a byte each  ┐
             └ steps ─────▸ a byte each        ┴─▸ one record ── deflate ─▸ a shorter one, for a slow link

A record, all of it in multiples of 8 bytes:

    header  int64 [5]   see `RecordHeader`
    wide    int [·]     steps that do not fit a byte, as wide as an element
    gaps    uint8 [·]   unchanged elements before each changed one; 255: that many, and no changed one yet
    narrow  int8 [·]    a byte for each step; -128: the next of the wide ones

Gaps and narrow steps can be deflated (zlib, RFC 1950), each alone. Equal stretches are rare in them, so they get
Huffman codes and no matches. After an optimizer step, a gap carries some 6.3 bits, and the step of a bf16 weight 2.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.errors import WireError
from asyncrl.sync.delta.delta import INTEGERS, Changes, IntegerArray

UNCHANGED = 255
"""A gap byte that ends at no changed element."""

WIDE = -128
"""A narrow byte whose step is among the wide ones."""

HEADER_BYTES = 40

PLAIN = -1
"""In the header, in place of the size of a part that is not deflated."""

EMPTY = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The beginning of a record, its fields in their order.

    gaps: their bytes, or -1: every element has a step · steps: how many · wide: how many of them, or -1: all
    deflated_gaps, deflated_narrow: bytes that these parts take when deflated, or PLAIN
    """

    gaps: int
    steps: int
    wide: int
    deflated_gaps: int = PLAIN
    deflated_narrow: int = PLAIN

    @staticmethod
    def of(record: torch.Tensor) -> RecordHeader:
        return RecordHeader(*record[:HEADER_BYTES].view(torch.int64).tolist())

    @property
    def dense(self) -> bool:
        return self.gaps == -1

    @property
    def all_wide(self) -> bool:
        return self.wide == -1

    @property
    def gap_bytes(self) -> int:
        return max(self.gaps, 0)

    @property
    def narrow_bytes(self) -> int:
        return 0 if self.all_wide else self.steps

    @property
    def wide_steps(self) -> int:
        return self.steps if self.all_wide else self.wide

    def sizes(self, item: int) -> list[int]:
        """Bytes in the record: the header, wide steps, gaps and narrow steps, zeros at the end."""
        gaps = self.gap_bytes if self.deflated_gaps == PLAIN else self.deflated_gaps
        narrow = self.narrow_bytes if self.deflated_narrow == PLAIN else self.deflated_narrow
        sizes = [HEADER_BYTES, self.wide_steps * item, gaps, narrow]
        return [*sizes, -sum(sizes) % 8]

    def check(self, elements: int) -> None:
        """Raises WireError if no tensor of so many elements has such a record."""
        positions = elements if self.dense else self.gap_bytes
        possible = 0 <= self.wide_steps <= self.steps <= positions <= elements
        if not possible or (self.dense and self.steps != elements):
            raise WireError(f"a delta for {elements} elements has an impossible header: {self}")
        deflated = ((self.deflated_gaps, self.gap_bytes), (self.deflated_narrow, self.narrow_bytes))
        if not all(size == PLAIN or 0 <= size < plain for size, plain in deflated):
            raise WireError(f"a delta with parts that deflating makes longer: {self}")

    def to_bytes(self) -> NDArray[np.uint8]:
        fields = (self.gaps, self.steps, self.wide, self.deflated_gaps, self.deflated_narrow)
        return np.array(fields, np.int64).view(np.uint8)


def most_bytes(raw: int) -> int:
    """No record of a tensor of `raw` bytes is longer."""
    return raw + raw // UNCHANGED + HEADER_BYTES + 8


def changes_nothing(record: torch.Tensor) -> bool:
    """Whether a record has no step."""
    return RecordHeader.of(record).steps == 0


def changes_to_bytes(changes: Changes) -> torch.Tensor:
    """The record of these changes, [bytes] uint8 on the CPU."""
    steps = changes.steps.cpu().contiguous().numpy()
    gaps = None if changes.positions is None else _gaps(changes.positions.cpu().numpy())
    narrow = steps.astype(np.int8)
    unfit = np.flatnonzero((narrow != steps) | (narrow == WIDE))
    wide = steps[unfit]
    if len(steps) + wide.nbytes < steps.nbytes:
        count = len(wide)
        narrow[unfit] = WIDE
    else:
        count, wide, narrow = -1, steps, narrow[:0]
    header = RecordHeader(-1 if gaps is None else len(gaps), len(steps), count)
    return _joined(header, wide, narrow[:0] if gaps is None else gaps, narrow)


def join(records: Iterable[tuple[torch.Tensor, int]], item: int) -> torch.Tensor | None:
    """The record of tensors that lie one after another.

    records: that of each tensor, not deflated, and its elements · item: bytes of an element

    Returns None where a record must be read for that: one without gaps, or with wide steps alone.
    """
    wide, gaps, narrow = [EMPTY], [EMPTY], [EMPTY]
    unchanged = 0  # elements since the last change
    for record, elements in records:
        header = RecordHeader.of(record)
        if not header.steps:
            unchanged += elements
            continue
        if header.dense or header.all_wide:
            return None
        _, own_wide, own_gaps, own_narrow, _ = (part.numpy() for part in record.split(header.sizes(item)))
        wide.append(own_wide)
        gaps.append(_longer(own_gaps, unchanged))
        narrow.append(own_narrow)
        unchanged = elements - header.steps - int(own_gaps.sum(dtype=np.int64))
    wide_bytes, gap_bytes, steps = (np.concatenate(parts) for parts in (wide, gaps, narrow))
    header = RecordHeader(len(gap_bytes), len(steps), len(wide_bytes) // item)
    return _joined(header, wide_bytes, gap_bytes, steps)


def deflate(record: torch.Tensor, item: int) -> torch.Tensor:
    """A record of `changes_to_bytes`, gaps and narrow steps deflated where that is shorter.

    item: bytes of an element
    """
    header = RecordHeader.of(record)
    _, wide, gaps, narrow, _ = (part.numpy() for part in record.split(header.sizes(item)))
    packed_gaps, packed_narrow = _deflated(gaps), _deflated(narrow)
    if len(packed_gaps) < len(gaps):
        header, gaps = replace(header, deflated_gaps=len(packed_gaps)), packed_gaps
    if len(packed_narrow) < len(narrow):
        header, narrow = replace(header, deflated_narrow=len(packed_narrow)), packed_narrow
    return _joined(header, wide, gaps, narrow)


def read(data: torch.Tensor, tensors: Iterable[tuple[int, int]]) -> Iterator[Changes]:
    """Records that lie one after another, one for each tensor of (elements, bytes of an element).

    Raises WireError for other data, and for data beyond the records. [bytes] uint8 at an address that is a multiple
    of 8.
    """
    at = 0
    for elements, item in tensors:
        changes, length = _record(data[at:], elements, item)
        at += length
        yield changes
    if at != data.numel():
        raise WireError(f"a delta of {data.numel()} bytes, of which {at} are read")


def _record(data: torch.Tensor, elements: int, item: int) -> tuple[Changes, int]:
    """The record that `data` begins with, and its bytes."""
    if data.numel() < HEADER_BYTES:
        raise WireError(f"a delta ends after {data.numel()} bytes of a header")
    header = RecordHeader.of(data)
    header.check(elements)
    sizes = header.sizes(item)
    if data.numel() < sum(sizes):
        raise WireError(f"a delta of {sum(sizes)} bytes ends after {data.numel()}")
    _, wide, gaps, narrow, _ = data[: sum(sizes)].split(sizes)
    if header.deflated_gaps != PLAIN:
        gaps = _inflated(gaps, header.gap_bytes)
    if header.deflated_narrow != PLAIN:
        narrow = _inflated(narrow, header.narrow_bytes)
    steps = wide.view(INTEGERS[item])
    if not header.all_wide:
        steps = torch.from_numpy(_steps(narrow.view(torch.int8).numpy(), steps.numpy()))
    positions = None if header.dense else torch.from_numpy(_positions(gaps.numpy(), header.steps, elements))
    return Changes(positions, steps), sum(sizes)


def _joined(header: RecordHeader, *parts: NDArray[Any]) -> torch.Tensor:
    """The record of these parts, with zeros up to a multiple of 8 bytes."""
    every = [header.to_bytes(), *(part.view(np.uint8) for part in parts)]
    return torch.from_numpy(np.concatenate([*every, np.zeros(-sum(map(len, every)) % 8, np.uint8)]))


def _deflated(part: NDArray[np.uint8]) -> NDArray[np.uint8]:
    packer = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    return np.frombuffer(packer.compress(part.data) + packer.flush(), np.uint8)


def _inflated(part: torch.Tensor, size: int) -> torch.Tensor:
    """[size] uint8. Raises WireError for anything else, of which no more than `size` + 1 bytes are unpacked."""
    unpacker = zlib.decompressobj()
    try:
        whole = unpacker.decompress(part.numpy().data, size + 1)
    except zlib.error as error:
        raise WireError(f"a delta with gaps or steps that cannot be inflated: {error}") from None
    if len(whole) != size or not unpacker.eof or unpacker.unused_data:
        raise WireError(f"a delta with gaps or steps of {len(whole)} bytes once inflated, not {size}")
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def _gaps(positions: NDArray[np.int64]) -> NDArray[np.uint8]:
    gaps = np.diff(positions, prepend=-1) - 1
    far = np.flatnonzero(gaps >= UNCHANGED)
    before = far.repeat(gaps[far] // UNCHANGED)
    gaps[far] %= UNCHANGED
    return np.insert(gaps.astype(np.uint8), before, UNCHANGED)


def _longer(gaps: NDArray[np.uint8], by: int) -> NDArray[np.uint8]:
    """Gaps of which the first has `by` more elements."""
    first = int(np.argmax(gaps != UNCHANGED))
    more, rest = divmod(by + int(gaps[first]), UNCHANGED)
    begin = np.full(first + more + 1, UNCHANGED, np.uint8)
    begin[-1] = rest
    return np.concatenate([begin, gaps[first + 1 :]])


def _steps(narrow: NDArray[np.int8], wide: IntegerArray) -> IntegerArray:
    marked = narrow == WIDE
    places = np.count_nonzero(marked)
    if places != len(wide):
        raise WireError(f"a delta with {places} places for {len(wide)} wide steps")
    steps = narrow.astype(wide.dtype)
    steps[marked] = wide
    return steps


def _positions(gaps: NDArray[np.uint8], count: int, elements: int) -> NDArray[np.int64]:
    changed = gaps != UNCHANGED
    found = np.count_nonzero(changed)
    if found != count or (len(gaps) and not changed[-1]):
        raise WireError(f"a delta with positions for {found} of {count} steps")
    ends = np.add(gaps, changed, dtype=np.int64)
    np.cumsum(ends, out=ends)
    if len(ends) and ends[-1] > elements:
        raise WireError(f"a delta that changes element {ends[-1] - 1} of {elements}")
    return (ends if len(ends) == count else ends[changed]) - 1
