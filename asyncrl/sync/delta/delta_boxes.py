"""Changes of boxes that tile a parameter, as changes of another box of it: how a delta follows a plan.

┌──────┬──────┐                      a learner's tiles ─▸ the piece that a plan takes from them,
│  ·┌──┼───┐  │                      with positions of its own
│   │· │  ·│ ·│
└───┴──┴───┴──┘
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import mul

import torch

from asyncrl.sync.delta.delta import Changes
from asyncrl.sync.layout.layout import Box


def cut(tiles: Iterable[tuple[Box, Changes]], part: Box) -> Changes:
    """The changes of `part`, an unempty box, of which each element lies in one of the tiles at most."""
    moved = [_moved(changes, tile, part) for tile, changes in tiles]
    steps = torch.cat([changes.steps for changes in moved])
    if len(moved) == 1 and moved[0].positions is None:
        return moved[0]
    positions = torch.cat([_positions(changes) for changes in moved])
    if 2 * len(positions) >= part.elements:
        return Changes(None, steps.new_zeros(part.elements).scatter_(0, positions, steps))
    if bool((positions.diff() < 0).any()):  # tiles beside each other
        positions, order = positions.sort()
        steps = steps[order]
    return Changes(positions, steps)


def _moved(changes: Changes, held: Box, part: Box) -> Changes:
    """The changes of `held` that lie within `part`, by their positions in `part`."""
    common = held.intersection(part)
    if common is None:
        return Changes(torch.empty(0, dtype=torch.int64), changes.steps[:0])
    if changes.positions is None:
        steps = changes.steps.view(held.shape)[common.within(held).slices()].reshape(-1)
        if common == part:
            return Changes(None, steps)
        return Changes(_renumbered(torch.arange(len(steps)), common, part), steps)
    # Row-major, so that the common elements lie between its first and its last.
    start, stop = _span(common, held)
    low, high = torch.searchsorted(changes.positions, torch.tensor([start, stop])).tolist()
    positions, steps = changes.positions[low:high], changes.steps[low:high]
    if stop - start == common.elements:
        return Changes(_renumbered(positions - start, common, part), steps)
    inside = _within(positions, held, common)
    return Changes(_renumbered(positions[inside], held, part), steps[inside])


def _positions(changes: Changes) -> torch.Tensor:
    return torch.arange(len(changes.steps)) if changes.positions is None else changes.positions


def _span(inner: Box, outer: Box) -> tuple[int, int]:
    """The row-major position in `outer` of the first element of `inner`, and of the one after its last."""
    inner, strides = inner.within(outer), _strides(outer)
    start = sum(map(mul, inner.offsets, strides))
    return start, start + sum(
        (size - 1) * stride for size, stride in zip(inner.shape, strides, strict=True)
    ) + 1


def _within(positions: torch.Tensor, held: Box, common: Box) -> torch.Tensor:
    """Which of the positions in `held` lie in `common`."""
    inside = torch.ones_like(positions, dtype=torch.bool)
    low, stops = common.within(held).offsets, common.within(held).stops
    for axis, index in enumerate(_indices(positions, held)):
        inside &= (index >= low[axis]) & (index < stops[axis])
    return inside


def _renumbered(positions: torch.Tensor, held: Box, part: Box) -> torch.Tensor:
    """Positions in `held`, of elements that lie in both, as positions in `part`."""
    common = held.intersection(part)
    if common == held:
        start, stop = _span(held, part)
        if stop - start == held.elements:
            return positions + start
    moved = torch.zeros_like(positions)
    for index, here, there, stride in zip(
        _indices(positions, held), held.offsets, part.offsets, _strides(part), strict=True
    ):
        moved += (index + (here - there)) * stride
    return moved


def _indices(positions: torch.Tensor, box: Box) -> list[torch.Tensor]:
    """One for each axis of the box, from its offset on."""
    return [
        positions // stride % size if size > 1 else torch.zeros_like(positions)
        for size, stride in zip(box.shape, _strides(box), strict=True)
    ]


def _strides(box: Box) -> list[int]:
    """Elements of the box between neighbours along each axis."""
    return [math.prod(box.shape[axis + 1 :]) for axis in range(len(box.shape))]
