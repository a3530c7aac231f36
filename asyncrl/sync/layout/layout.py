"""The boxes of each rank: parameters in checkpoint coordinates.

A *parameter* is named and shaped as in the checkpoint (Hugging Face). A *box* is an axis-aligned part of it.
A `Layout` has the boxes of each parameter that one rank holds (a learner) or needs (a generator):

    "model.embed_tokens.weight"  [10, 4] float32
        rank 0 holds Box((0, 0), (5, 4))      rank 1 holds Box((5, 0), (5, 4))

A rank has one tensor of each box's shape, views into a fused or strided parameter if need be. A parameter of which
it holds nothing has no boxes; its tensors may be missing.

`Owners` are the layouts of all ranks, turned around for the planner:

    owners.held("model.embed_tokens.weight", needed)  ▸  first 8, cells  Box((0, 0), (5, 4)) ranks (0, 2)
                                                                          Box((5, 0), (5, 4)) ranks (1, 3)
                                                          held by 8 and 10 · by 9 and 11

Parameters that are cut alike share one tuple of cells, on any ranks: ranks are counted from `first`. So 512
ranks with 45,000 parameters need no 23 million boxes. No torch here: a plan can be made and tested anywhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple, Protocol

from asyncrl.errors import WeightSyncError, WireError

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by torch's name of the dtype."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements [offsets[d], offsets[d] + shape[d]) along each axis d. A scalar's box is Box((), ())."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.shape) or min((*self.offsets, *self.shape), default=0) < 0:
            raise ValueError(f"not a box: offsets {self.offsets}, shape {self.shape}")

    @staticmethod
    def whole(shape: Iterable[int]) -> Box:
        """All of a parameter of that shape."""
        shape = tuple(shape)
        return Box((0,) * len(shape), shape)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def stops(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offsets, self.shape, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """The common part; None where there is none."""
        lows = tuple(map(max, self.offsets, other.offsets))
        shape = tuple(stop - low for stop, low in zip(map(min, self.stops, other.stops), lows, strict=True))
        return Box(lows, shape) if all(n > 0 for n in shape) else None

    def contains(self, other: Box) -> bool:
        return all(a <= b for a, b in zip(self.offsets, other.offsets, strict=True)) and all(
            a >= b for a, b in zip(self.stops, other.stops, strict=True)
        )

    def within(self, outer: Box) -> Box:
        """The same elements, in the coordinates of a tensor that holds `outer`."""
        offsets = tuple(o - base for o, base in zip(self.offsets, outer.offsets, strict=True))
        return Box(offsets, self.shape)

    def slices(self) -> tuple[slice, ...]:
        """The index of this box in a tensor of the whole parameter."""
        return tuple(map(slice, self.offsets, self.stops))

    def minus(self, hole: Box) -> list[Box]:
        """This box without the elements of `hole`, as disjoint boxes."""
        common = self.intersection(hole)
        if common is None:
            return [self] if self.elements else []
        rest: list[Box] = []
        offsets, shape = list(self.offsets), list(self.shape)
        for axis, (low, stop) in enumerate(zip(common.offsets, common.stops, strict=True)):
            before, after = low - offsets[axis], offsets[axis] + shape[axis] - stop
            for start, count in ((offsets[axis], before), (stop, after)):
                if count:
                    rest.append(
                        Box(
                            (*offsets[:axis], start, *offsets[axis + 1 :]),
                            (*shape[:axis], count, *shape[axis + 1 :]),
                        )
                    )
            offsets[axis], shape[axis] = low, stop - low
        return rest


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """One parameter on one rank: its full shape, its dtype ("bfloat16") and the boxes held or needed here.

    Raises ValueError for an unknown dtype, for a box that leaves the parameter, and for boxes that overlap.
    """

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(ITEM_BYTES)}")
        whole = Box.whole(self.shape)
        for box in self.boxes:
            if len(box.shape) != len(self.shape) or not whole.contains(box):
                raise ValueError(f"{box} is no part of a parameter of shape {self.shape}")
        for a, b in combinations(self.boxes, 2):
            if a.intersection(b):
                raise ValueError(f"boxes overlap: {a} and {b}")

    @property
    def elements(self) -> int:
        """Elements held here."""
        return sum(box.elements for box in self.boxes)

    @property
    def bytes(self) -> int:
        """Bytes held here."""
        return self.elements * ITEM_BYTES[self.dtype]


Layout = Mapping[str, ParamLayout]
"""One rank's parameters by checkpoint name."""


def whole_layout(shapes: Mapping[str, tuple[Iterable[int], str]]) -> dict[str, ParamLayout]:
    """The layout of a rank that holds each parameter whole: {name: (full shape, dtype name)}."""
    layout = {}
    for name, (shape, dtype) in shapes.items():
        full = tuple(shape)
        layout[name] = ParamLayout(full, dtype, (Box.whole(full),))
    return layout


def layout_bytes(layout: Layout) -> int:
    """Bytes that a rank of this layout holds."""
    return sum(param.bytes for param in layout.values())


def layout_key(layout: Layout) -> str:
    """The same for two ranks that hold or need the same boxes, whatever the order of their parameters."""
    text = hashlib.blake2b(digest_size=16)
    for name in sorted(layout):
        param = layout[name]
        boxes = [(box.offsets, box.shape) for box in param.boxes]
        text.update(repr((name, param.shape, param.dtype, boxes)).encode())
    return text.hexdigest()


def to_wire(layout: Layout) -> dict[str, Any]:
    """Plain msgpack-able values: {name: [shape, dtype, [[offsets, shape], …]]}."""
    return {
        name: [list(p.shape), p.dtype, [[list(b.offsets), list(b.shape)] for b in p.boxes]]
        for name, p in layout.items()
    }


def from_wire(value: Any) -> dict[str, ParamLayout]:
    """The inverse of `to_wire`; raises WireError for anything else."""
    try:
        return {
            str(name): ParamLayout(_ints(shape), dtype, tuple(Box(_ints(o), _ints(s)) for o, s in boxes))
            for name, (shape, dtype, boxes) in value.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise WireError(f"not a layout: {error}") from error


def _ints(values: Iterable[Any]) -> tuple[int, ...]:
    ints = tuple(values)
    if not all(type(value) is int for value in ints):
        raise TypeError(f"not all integers: {ints}")
    return ints


class Cell(NamedTuple):
    """A box and the ranks that hold it, counted from the parameter's first."""

    box: Box
    ranks: tuple[int, ...]


class OwnedBoxes(NamedTuple):
    """The boxes of one parameter, and the rank that cells count from."""

    cells: tuple[Cell, ...]
    first: int = 0


class Owners(Protocol):
    """The layouts of all ranks together."""

    @property
    def key(self) -> str:
        """The same for the same layouts."""
        ...

    def held(self, name: str, needed: ParamLayout) -> OwnedBoxes:
        """The owners of a parameter. Raises WeightSyncError for another shape or dtype than `needed`."""
        ...


class OwnersOf:
    """`Owners` of layouts by rank, of which every rank has sent its own."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._layouts = layouts
        self._ranks: dict[str, list[int]] = {}
        for rank, layout in enumerate(layouts):
            for name, param in layout.items():
                if param.boxes:
                    self._ranks.setdefault(name, []).append(rank)
        self._shared: dict[tuple[Cell, ...], tuple[Cell, ...]] = {}
        self._held: dict[str, OwnedBoxes] = {}

    @cached_property
    def key(self) -> str:
        keys = [layout_key(layout) for layout in self._layouts]
        return hashlib.blake2b(repr(keys).encode(), digest_size=16).hexdigest()

    def held(self, name: str, needed: ParamLayout) -> OwnedBoxes:
        ranks = self._ranks.get(name, [])
        for rank in ranks:
            check_same(name, needed, self._layouts[rank][name], rank)
        if name not in self._held:
            boxes: dict[Box, list[int]] = {}
            for rank in ranks:
                for box in self._layouts[rank][name].boxes:
                    boxes.setdefault(box, []).append(rank - ranks[0])
            cells = tuple(Cell(box, tuple(boxes[box])) for box in sorted(boxes))
            self._held[name] = OwnedBoxes(self._shared.setdefault(cells, cells), ranks[0] if ranks else 0)
        return self._held[name]


def check_same(name: str, needed: ParamLayout, there: ParamLayout, rank: int) -> None:
    """Raise WeightSyncError where the generator needs another shape or dtype than a rank has."""
    for what, here, theirs in (("shape", needed.shape, there.shape), ("dtype", needed.dtype, there.dtype)):
        if here != theirs:
            raise WeightSyncError(
                f"parameter {name}: the generator needs {what} {here}, learner rank {rank} has {theirs}"
            )


def are_disjoint(boxes: Iterable[Box]) -> bool:
    """Whether no two of them share an element."""
    near: list[Box] = []  # boxes that may still overlap a later one, by the first axis
    for box in sorted(boxes):
        near = [other for other in near if not box.shape or other.stops[0] > box.offsets[0]]
        if any(other.intersection(box) for other in near):
            return False
        near.append(box)
    return True
