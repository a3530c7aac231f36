"""The learner ranks that hold each box of a parameter: layouts turned around for the planner.

    owners.held("model.embed_tokens.weight", needed)  ▸  first 8, cells  Box((0, 0), (5, 4)) ranks (0, 2)
                                                                          Box((5, 0), (5, 4)) ranks (1, 3)
                                                          held by 8 and 10 · by 9 and 11

Parameters that are cut alike share one tuple of cells, on any ranks: ranks are counted from `first`. So 512
ranks with 45,000 parameters need no 23 million boxes. No torch here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

from asyncrl.errors import WeightSyncError
from asyncrl.sync.layout.layout import Box, Layout, ParamLayout, layout_key


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
