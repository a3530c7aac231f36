"""Converts flat ranges of shards into boxes of checkpoint parameters.

    optimizer of data rank 1 of 2     elements [6, 12) of a shard [3, 4]
                                        . . . .
                                        . . x x      rectangle (1, 2) + (1, 2)
                                        x x x x      rectangle (2, 0) + (1, 4)

Megatron's distributed optimizer cuts its buffers at any element, so a rank steps on a flat range of each shard. A range
is at most three rectangles, and each rectangle consists of boxes of the checkpoint. So every rank saves its own boxes,
under Hugging Face's names, and any other layout can read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from asyncrl.sync.layout.layout import Box
from asyncrl.sync.layout.megatron import MegatronPart


class BoxShard(NamedTuple):
    """A box of the checkpoint parameter `name`, of this full shape; elements [start, stop) of the shard in memory."""

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    stop: int


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) of a row-major tensor of one or two dimensions, as boxes.

    >>> [(box.offsets, box.shape) for box in rectangles((3, 4), 6, 12)]
    [((1, 2), (1, 2)), ((2, 0), (1, 4))]
    """
    if len(shape) == 1:
        yield from [Box((start,), (stop - start,))] if stop > start else []
        return
    width = shape[1]
    while start < stop:
        row, column = divmod(start, width)
        rows = (stop - start) // width if column == 0 else 0
        box = (
            Box((row, 0), (rows, width))
            if rows
            else Box((row, column), (1, min(width - column, stop - start)))
        )
        yield box
        start += box.elements


def cuts(parts: Sequence[MegatronPart], shape: Sequence[int], start: int, stop: int) -> Iterator[BoxShard]:
    """Elements [start, stop) of a shard that consists of `parts`, one below another. Padding rows are in no part."""
    width = shape[1] if len(shape) > 1 else 1
    for rectangle in rectangles(shape, start, stop):
        first = 0
        for part in parts:
            here = Box((first, *(0 for _ in shape[1:])), part.box.shape)
            common = rectangle.intersection(here)
            if common is not None:
                at = common.offsets[0] * width + (common.offsets[1] if len(shape) > 1 else 0)
                inside = (
                    common.offsets[0] - first + part.box.offsets[0],
                    *(a + b for a, b in zip(common.offsets[1:], part.box.offsets[1:], strict=True)),
                )
                box = Box(inside, common.shape)
                yield BoxShard(part.name, part.shape, box, at, at + common.elements)
            first += part.box.shape[0]
