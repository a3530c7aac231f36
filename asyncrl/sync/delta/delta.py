"""The changes between two versions of a tensor, bit for bit. `records.py` has their bytes.

    old ─┐                    ┌ positions
         ├─ compare the bits ─┤
    new ─┘                    └ steps: new bits - old bits

An optimizer step moves most bf16 weights by less than half a unit in the last place: they do not change at all, and
those that do change by one unit. Bits are read as signed integers, so a unit is a step of 1; steps wrap, so NaN
payloads, -0.0 and any other bits come back exactly. Adding steps to the wrong base gives wrong bits: a reader must know
the base, and checks a hash afterwards.

Changes of boxes that tile a parameter become changes of another box of it (`cut`): so a delta follows a plan.

┌──────┬──────┐
│  ·┌──┼───┐  │                      a learner's tiles ─▸ the piece that a plan takes from them,
│   │· │  ·│ ·│                                           with positions of its own
└───┴──┴───┴──┘
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.sync.layout.layout import Box

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type that an element's bits are read as, by its bytes."""

CHUNK = 1 << 17
"""Elements compared at once."""

WORD_BYTES = 8

IntegerArray = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of one tensor.

    positions: [K] int64, rising, row-major; None: every element, in order · steps: [K], new bits minus old bits, as
    integers of the element's width, which wrap
    """

    positions: torch.Tensor | None
    steps: torch.Tensor


def find_changes(old: torch.Tensor, new: torch.Tensor) -> Changes:
    """The changes from `old` to `new`, on the CPU: same shape and dtype, any strides. `device_delta.py` finds those on
    accelerators."""
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"{old.dtype} {tuple(old.shape)} against {new.dtype} {tuple(new.shape)}")
    before, after = (bits(each).reshape(-1).numpy() for each in (old, new))
    starts = range(0, max(1, len(before)), CHUNK)
    found = [_changed(before[at : at + CHUNK], after[at : at + CHUNK]) for at in starts]
    positions = np.concatenate([start + here for start, (here, _) in zip(starts, found, strict=True)])
    if 2 * len(positions) >= len(before):  # positions would cost more than they save
        return Changes(None, torch.from_numpy(after - before))
    return Changes(
        torch.from_numpy(positions), torch.from_numpy(np.concatenate([steps for _, steps in found]))
    )


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


def in_order(parts: Iterable[Box], whole: Box) -> bool:
    """Whether the elements of `whole`, row-major, are those of its parts, one part after another."""
    at = 0
    for part in parts:
        start, stop = _span(part, whole)
        if start != at or stop - start != part.elements:
            return False
        at = stop
    return at == whole.elements


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


def _changed(before: IntegerArray, after: IntegerArray) -> tuple[IntegerArray, IntegerArray]:
    """Positions and steps of two vectors. Most words of WORD_BYTES are the same in both, and are left out first."""
    in_word = WORD_BYTES // before.itemsize  # a power of two
    shift = in_word.bit_length() - 1
    steps = np.zeros(-(-len(before) // in_word) * in_word, before.dtype)
    np.subtract(after, before, out=steps[: len(before)])
    words = steps.view(np.int64)
    # Both times of booleans: NumPy searches them several times as fast as numbers.
    differing = np.flatnonzero(words != 0)
    steps = words[differing].view(before.dtype)
    at = np.flatnonzero(steps != 0)
    return (differing[at >> shift] << shift) + (at & (in_word - 1)), steps[at]
