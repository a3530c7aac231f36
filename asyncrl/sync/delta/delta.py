"""The changes between two versions of a tensor, bit for bit, in few bytes.

    old ─┐                    ┌ positions ─▸ gaps, one byte each              ┐
         ├─ compare the bits ─┤                                               ├─▸ one record of bytes
    new ─┘                    └ steps (new bits - old bits) ─▸ one byte each  ┘

An optimizer step moves most bf16 weights by less than half a unit in the last place: they do not change at all, and
those that do change by one unit. Bits are read as signed integers, so a unit is a step of 1; steps wrap, so NaN
payloads, -0.0 and any other bits come back exactly. Adding steps to the wrong base gives wrong bits: a reader must know
the base, and checks a hash afterwards.

A record, all of it in multiples of 8 bytes:

    header  int64 [5]   bytes of gaps, or -1: every element has a step · steps · wide steps, or -1: all are wide
                        · bytes of gaps and of narrow steps where they are deflated, else -1
    wide    int [·]     steps that do not fit a byte, as wide as an element
    gaps    uint8 [·]   unchanged elements before each changed one; 255: that many, and no changed one yet
    narrow  int8 [·]    a byte for each step; -128: the next of the wide ones

Gaps and narrow steps may be deflated (RFC 1950), each alone, for a slow link. Equal stretches are rare in them, so they
get Huffman codes and no matches. Of bf16 weights after an optimizer step, gaps have some 6.3 bits and steps 2.

Changes of boxes that tile a parameter become changes of another box of it (`cut`): so a delta follows a plan.

┌──────┬──────┐
│  ·┌──┼───┐  │                      a learner's tiles ─▸ the piece that a plan takes from them,
│   │· │  ·│ ·│                                           with positions of its own
└───┴──┴───┴──┘
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.errors import WireError
from asyncrl.sync.layout.layout import Box

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type that an element's bits are read as, by its bytes."""

CHUNK = 1 << 18
"""Elements compared at once."""

UNCHANGED = 255
"""A gap byte that ends at no changed element."""

WIDE = -128
"""A narrow byte whose step is among the wide ones."""

HEADER_BYTES = 40

GAPS_DEFLATED, STEPS_DEFLATED = 3, 4
"""Places in the header."""

PLAIN = -1
"""In place of the bytes of what is not deflated."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of one tensor.

    positions: [K] int64, rising, row-major; None: every element, in order · steps: [K], new bits minus old bits, as
    integers of the element's width, which wrap
    """

    positions: torch.Tensor | None
    steps: torch.Tensor


def most_bytes(raw: int) -> int:
    """No record of a tensor of `raw` bytes is longer."""
    return raw + raw // UNCHANGED + HEADER_BYTES + 8


def find_changes(old: torch.Tensor, new: torch.Tensor) -> Changes:
    """The changes from `old` to `new`, on the CPU: same shape and dtype, any strides. `device_delta.py` finds those on
    accelerators."""
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"{old.dtype} {tuple(old.shape)} against {new.dtype} {tuple(new.shape)}")
    before, after = bits(old).reshape(-1), bits(new).reshape(-1)
    positions = torch.cat(list(_differing(before, after)))
    if 2 * positions.numel() >= before.numel():  # positions would cost more than they save
        return Changes(None, after - before)
    return Changes(positions, after.index_select(0, positions) - before.index_select(0, positions))


def add(target: torch.Tensor, changes: Changes) -> None:
    """Add the steps to the target's bits. Positions must lie in it; any strides."""
    held, steps = bits(target), changes.steps.to(target.device)
    if changes.positions is None:
        held.add_(steps.view(target.shape))
        return
    flat = held.reshape(-1)  # a copy where the target has gaps in memory
    flat.scatter_add_(0, changes.positions.to(target.device), steps)
    if not held.is_contiguous():
        held.copy_(flat.view(held.shape))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, no copy."""
    return tensor.detach().view(INTEGERS[tensor.element_size()])


def changes_to_bytes(changes: Changes) -> torch.Tensor:
    """The record of these changes, [bytes] uint8 on the CPU."""
    steps = changes.steps.cpu().contiguous()
    gaps = None if changes.positions is None else _gaps(changes.positions.cpu())
    narrow = steps.to(torch.int8)
    unfit = (narrow != steps) | (narrow == WIDE)
    wide = steps[unfit] if bool(unfit.any()) else steps[:0]
    if steps.numel() + wide.numel() * steps.element_size() < steps.numel() * steps.element_size():
        count, narrow = wide.numel(), narrow.masked_fill_(unfit, WIDE)
    else:
        count, wide, narrow = -1, steps, narrow[:0]
    header = torch.tensor([-1 if gaps is None else gaps.numel(), steps.numel(), count, PLAIN, PLAIN])
    return _joined(part.view(torch.uint8) for part in (header, wide, gaps, narrow) if part is not None)


def deflate(record: torch.Tensor, item: int) -> torch.Tensor:
    """A record of `changes_to_bytes`, gaps and narrow steps deflated where that is shorter.

    item: bytes of an element
    """
    fields, parts = _fields(record), []
    whole = _whole_sizes(fields, item)
    _, wide, *packable, _ = record.split([HEADER_BYTES, *whole, record.numel() - HEADER_BYTES - sum(whole)])
    for place, part in zip((GAPS_DEFLATED, STEPS_DEFLATED), packable, strict=True):
        deflated = _deflated(part)
        shorter = deflated.numel() < part.numel()
        fields[place] = deflated.numel() if shorter else PLAIN
        parts.append(deflated if shorter else part)
    return _joined([torch.tensor(fields).view(torch.uint8), wide, *parts])


def read(data: torch.Tensor, tensors: list[tuple[int, int]]) -> Iterator[Changes]:
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


def cut(tiles: Iterable[tuple[Box, Changes]], part: Box) -> Changes:
    """The changes of `part`, an unempty box, of which each element lies in one of the tiles at most."""
    common = [
        (both, tile, changes) for tile, changes in tiles if (both := tile.intersection(part)) is not None
    ]
    moved = [
        _moved(changes.positions, changes.steps, both, tile, part)
        for both, tile, changes in common
        if changes.positions is not None
    ]
    if len(moved) == len(common) and 2 * sum(len(steps) for _, steps in moved) < part.elements:
        positions, steps = (torch.cat(values) for values in zip(*moved, strict=True))
        if bool((positions.diff() < 0).any()):  # tiles beside each other, or in another order
            positions, order = positions.sort()
            steps = steps[order]
        return Changes(positions, steps)
    steps = common[0][2].steps.new_zeros(part.shape)  # 0: unchanged
    for both, tile, changes in common:
        steps[both.within(part).slices()] = _all_steps(changes, tile)[both.within(tile).slices()]
    steps = steps.view(-1)
    positions = torch.from_numpy(np.flatnonzero(steps.numpy()))
    return Changes(None, steps) if 2 * len(positions) >= len(steps) else Changes(positions, steps[positions])


def _moved(
    positions: torch.Tensor, steps: torch.Tensor, both: Box, tile: Box, part: Box
) -> tuple[torch.Tensor, torch.Tensor]:
    """The changes of a tile that lie in `both`, by their positions in `part`; and their steps."""
    (here, stop), (there, end) = _span(both, tile), _span(both, part)
    first, last = torch.searchsorted(positions, torch.tensor([here, stop])).tolist()
    positions, steps = positions[first:last], steps[first:last]
    if stop - here == end - there == both.elements:  # without gaps
        return positions + (there - here), steps
    held, found = both.within(tile), both.within(part)
    indices = np.unravel_index(positions.numpy(), tile.shape)
    inside = np.logical_and.reduce(
        [(low <= at) & (at < high) for at, low, high in zip(indices, held.offsets, held.stops, strict=True)]
    )
    moved = [
        at[inside] - low + new for at, low, new in zip(indices, held.offsets, found.offsets, strict=True)
    ]
    return torch.from_numpy(np.ravel_multi_index(moved, part.shape)), steps[torch.from_numpy(inside)]


def _span(inner: Box, outer: Box) -> tuple[int, int]:
    """The row-major position in `outer` of the first element of `inner`, and of the one after its last."""
    first, last, stride = 0, 0, 1
    box = inner.within(outer)
    for offset, size, full in zip(
        reversed(box.offsets), reversed(box.shape), reversed(outer.shape), strict=True
    ):
        first, last, stride = first + offset * stride, last + (offset + size - 1) * stride, stride * full
    return first, last + 1


def _all_steps(changes: Changes, tile: Box) -> torch.Tensor:
    """The steps of all elements of a tile, in its shape."""
    if changes.positions is None:
        return changes.steps.view(tile.shape)
    steps = changes.steps.new_zeros(tile.elements)
    return steps.scatter_(0, changes.positions, changes.steps).view(tile.shape)


def _differing(before: torch.Tensor, after: torch.Tensor) -> Iterator[torch.Tensor]:
    """Positions where two vectors differ, chunk by chunk. NumPy finds them twice as fast as torch on a CPU."""
    for start in range(0, max(1, before.numel()), CHUNK):
        a, b = before[start : start + CHUNK], after[start : start + CHUNK]
        yield torch.from_numpy(np.flatnonzero(a.numpy() != b.numpy())) + start


def _gaps(positions: torch.Tensor) -> torch.Tensor:
    """[bytes] uint8."""
    gaps = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1
    if not gaps.numel() or int(gaps.max()) < UNCHANGED:
        return gaps.to(torch.uint8)
    ends = (gaps // UNCHANGED + 1).cumsum(0)
    coded = torch.full((int(ends[-1]),), UNCHANGED, dtype=torch.uint8)
    coded[ends - 1] = (gaps % UNCHANGED).to(torch.uint8)
    return coded


def _record(data: torch.Tensor, elements: int, item: int) -> tuple[Changes, int]:
    """The record that `data` begins with, and its bytes."""
    if data.numel() < HEADER_BYTES:
        raise WireError(f"a delta ends after {data.numel()} bytes of a header")
    fields = _fields(data)
    dense, all_wide = fields[0] == -1, fields[2] == -1
    gap_bytes, count, wide_count = max(fields[0], 0), fields[1], fields[1] if all_wide else fields[2]
    if not (0 <= wide_count <= count <= elements and count <= (elements if dense else gap_bytes) <= elements):
        raise WireError(
            f"a delta of {count} steps, {wide_count} wide, {gap_bytes} gaps, for {elements} elements"
        )
    if dense and count != elements:
        raise WireError(f"a delta of {count} steps for all of {elements} elements")
    wide_bytes, *whole = _whole_sizes(fields, item)
    deflated = fields[GAPS_DEFLATED], fields[STEPS_DEFLATED]
    if not all(PLAIN <= size <= most for size, most in zip(deflated, whole, strict=True)):
        raise WireError(f"a delta of {whole} bytes of gaps and steps, {list(deflated)} when deflated")
    sizes = [most if size == PLAIN else size for size, most in zip(deflated, whole, strict=True)]
    used = HEADER_BYTES + wide_bytes + sum(sizes)
    length = -(-used // 8) * 8
    if data.numel() < length:
        raise WireError(f"a delta of {length} bytes ends after {data.numel()}")
    _, wide, *packed, _ = data[:length].split([HEADER_BYTES, wide_bytes, *sizes, length - used])
    gaps, narrow = (
        part if size == PLAIN else _inflated(part, most)
        for part, size, most in zip(packed, deflated, whole, strict=True)
    )
    steps = wide.view(INTEGERS[item])
    if not all_wide:
        steps = _steps(narrow.view(torch.int8), steps)
    return Changes(None if dense else _positions(gaps, count, elements), steps), length


def _fields(record: torch.Tensor) -> list[int]:
    fields: list[int] = record[:HEADER_BYTES].view(torch.int64).tolist()
    return fields


def _whole_sizes(fields: Sequence[int], item: int) -> tuple[int, int, int]:
    """Bytes of wide steps, gaps and narrow steps, none of them deflated."""
    gap_bytes, count, wide_count = fields[:3]
    all_wide = wide_count == -1
    return (count if all_wide else wide_count) * item, max(gap_bytes, 0), 0 if all_wide else count


def _joined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """A record of these parts, with zeros up to a multiple of 8 bytes."""
    every = list(parts)
    return torch.cat([*every, torch.zeros(-sum(map(len, every)) % 8, dtype=torch.uint8)])


def _deflated(part: torch.Tensor) -> torch.Tensor:
    packer = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    return torch.frombuffer(bytearray(packer.compress(part.numpy().data) + packer.flush()), dtype=torch.uint8)


def _inflated(part: torch.Tensor, size: int) -> torch.Tensor:
    """[size] uint8. Raises WireError for anything else; no more than `size` bytes are unpacked."""
    unpacker = zlib.decompressobj()
    try:
        whole = unpacker.decompress(part.numpy().data, size + 1)
    except zlib.error as error:
        raise WireError(f"a delta with gaps or steps that cannot be inflated: {error}") from None
    if len(whole) != size or not unpacker.eof or unpacker.unused_data:
        raise WireError(f"a delta with gaps or steps of {len(whole)} bytes once inflated, not {size}")
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def _steps(narrow: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    marked = narrow == WIDE
    if int(marked.sum()) != wide.numel():
        raise WireError(f"a delta with {int(marked.sum())} places for {wide.numel()} wide steps")
    steps = narrow.to(wide.dtype)
    if wide.numel():
        steps[marked] = wide
    return steps


def _positions(gaps: torch.Tensor, count: int, elements: int) -> torch.Tensor:
    changed = gaps != UNCHANGED
    if int(changed.sum()) != count or (gaps.numel() and not bool(changed[-1])):
        raise WireError(f"a delta with positions for {int(changed.sum())} of {count} steps")
    ends = (gaps.to(torch.int64) + changed).cumsum(0)
    if gaps.numel() and int(ends[-1]) > elements:
        raise WireError(f"a delta that changes element {int(ends[-1]) - 1} of {elements}")
    return (ends if gaps.numel() == count else ends[changed]) - 1
