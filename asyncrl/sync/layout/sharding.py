"""Layouts of many ranks from shapes alone: a mesh of ranks, and how each parameter is cut over its axes.

    Mesh  dp 4 × tp 2                              rank = dp · 2 + tp
    q_proj.weight  Split(tp, 0), Split(dp, 0)      rows to tp, then each part to dp: FSDP2 over tensor parallelism
    norm.weight    Split(dp, 0)                    the tp ranks are replicas
    experts.17…    at tp 1, Split(dp, 0)           expert parallelism: whole parameters belong to one coordinate

A cut is torch's: parts of ⌈n / parts⌉ rows, the last ones smaller or empty. A packed parameter is cut block by block:
[gate; up] over tp 2 gives rank 0 the first half of each, one after another in its tensor. No torch here.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from asyncrl.sync.layout.layout import Box, Cell, OwnedBoxes, ParamLayout, check_same


@dataclass(frozen=True, slots=True)
class Split:
    """Along dimension `dim` over the ranks of `axes`, the first the slowest.

    parts: fewer than there are ranks, which then share (key and value heads) · blocks: rows of the blocks of a packed
    parameter, each cut by itself.
    """

    axes: tuple[str, ...]
    dim: int = 0
    parts: int | None = None
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sharding:
    """A parameter of a mesh. splits: in their order, each of the part that the one before left · at: the coordinates of
    the ranks that hold it at all."""

    shape: tuple[int, ...]
    dtype: str
    splits: tuple[Split, ...] = ()
    at: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class RankMesh:
    """Names and sizes of the axes, the slowest first: the last one's neighbours are consecutive ranks."""

    axes: tuple[tuple[str, int], ...]

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @cached_property
    def strides(self) -> dict[str, int]:
        """The difference in rank of a step along each axis."""
        strides, stride = {}, 1
        for axis, size in reversed(self.axes):
            strides[axis] = stride
            stride *= size
        return strides

    def rank(self, coordinates: Mapping[str, int]) -> int:
        return sum(self.strides[axis] * at for axis, at in coordinates.items())

    def count(self, axes: Iterable[str]) -> int:
        """Ranks along some axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def unravel(self, axes: Sequence[str], index: int) -> tuple[tuple[str, int], ...]:
        """The coordinates of number `index` along some axes, the first of them the slowest."""
        found = []
        for axis in reversed(axes):
            found.append((axis, index % self.sizes[axis]))
            index //= self.sizes[axis]
        return tuple(reversed(found))

    def coordinates(self, rank: int) -> dict[str, int]:
        return {axis: rank // self.strides[axis] % size for axis, size in self.axes}


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of a chunk as `torch.chunk` makes them, empty ones included."""
    size = -(-length // parts)
    start = min(size * index, length)
    return start, min(size, length - start)


@dataclass(frozen=True, slots=True)
class Local:
    """One rank's tensor of a parameter: the boxes of which it consists, one after another along `dim`."""

    boxes: tuple[Box, ...]
    dim: int = 0

    def chunk(self, dim: int, parts: int, index: int) -> Local:
        """The part at rank `index` of `parts` when the tensor is cut along `dim`."""
        if dim == self.dim or len(self.boxes) == 1:
            length = sum(box.shape[dim] for box in self.boxes)
            return Local(tuple(_cut(self.boxes, dim, *chunk(length, parts, index))), dim)
        each = (_cut([box], dim, *chunk(box.shape[dim], parts, index)) for box in self.boxes)
        return Local(tuple(part for parts_ in each for part in parts_), self.dim)

    def chunk_blocks(self, dim: int, blocks: Sequence[int], parts: int, index: int) -> Local:
        """The same for a packed parameter: each block, of so many rows, is cut by itself."""
        if sum(blocks) != sum(box.shape[dim] for box in self.boxes) or len(self.boxes) > 1:
            raise ValueError(f"blocks {tuple(blocks)} of {self.boxes}: they must add up to one box")
        found: list[Box] = []
        begin = 0
        for rows in blocks:
            start, length = chunk(rows, parts, index)
            found += _cut(self.boxes, dim, begin + start, length)
            begin += rows
        return Local(tuple(found), dim)


def _cut(boxes: Sequence[Box], dim: int, start: int, length: int) -> Iterator[Box]:
    """Elements [start, start + length) of boxes that lie one after another along `dim`."""
    for box in boxes:
        low, stop = max(start, 0), min(start + length, box.shape[dim])
        if stop > low:
            offsets, shape = list(box.offsets), list(box.shape)
            offsets[dim] += low
            shape[dim] = stop - low
            yield Box(tuple(offsets), tuple(shape))
        start -= box.shape[dim]


class MeshLayout:
    """`Owners` of all ranks of a mesh; `rank(r)` is the layout of one.

    Parameters of one shape and cut share their boxes. Raises ValueError, naming the parameter, for an axis that the
    mesh does not have, an axis used twice, and blocks that do not add up.
    """

    def __init__(self, mesh: RankMesh, params: Mapping[str, Sharding]) -> None:
        self.mesh = mesh
        self.params = params
        self._forms: dict[tuple[object, ...], _Form] = {}
        for name, sharding in params.items():
            try:
                self._form(sharding)
            except ValueError as error:
                raise ValueError(f"parameter {name}: {error}") from error

    @cached_property
    def key(self) -> str:
        text = repr((self.mesh.axes, sorted(self.params.items(), key=lambda item: item[0])))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def held(self, name: str, needed: ParamLayout) -> OwnedBoxes:
        sharding = self.params.get(name)
        if sharding is None:
            return OwnedBoxes(())
        first = self.mesh.rank(dict(sharding.at))
        form = self._form(sharding)
        check_same(name, needed, form.whole, first)
        return OwnedBoxes(form.cells, first)

    def rank(self, rank: int) -> dict[str, ParamLayout]:
        """The layout of one rank, without parameters of which it holds nothing."""
        here = self.mesh.coordinates(rank)
        layout = {}
        for name, sharding in self.params.items():
            if all(here[axis] == at for axis, at in sharding.at):
                held = self._form(sharding).by_rank.get(rank - self.mesh.rank(dict(sharding.at)))
                if held is not None:
                    layout[name] = held
        return layout

    def bytes_by_rank(self) -> list[int]:
        """Bytes of each rank."""
        held = [0] * self.mesh.ranks
        for sharding, count in Counter(self.params.values()).items():
            first = self.mesh.rank(dict(sharding.at))
            for rank, param in self._form(sharding).by_rank.items():
                held[first + rank] += count * param.bytes
        return held

    @property
    def largest(self) -> dict[str, ParamLayout]:
        """The layout of the rank that holds most bytes."""
        held = self.bytes_by_rank()
        return self.rank(held.index(max(held)))

    def _form(self, sharding: Sharding) -> _Form:
        fixed = tuple(axis for axis, _ in sharding.at)
        key = (sharding.shape, sharding.dtype, sharding.splits, fixed)
        if key not in self._forms:
            self._forms[key] = _Form.of(self.mesh, sharding, fixed)
        return self._forms[key]


@dataclass(frozen=True, slots=True)
class _Form:
    """The boxes of parameters of one shape and cut on the mesh, ranks counted from the first that holds any."""

    whole: ParamLayout
    cells: tuple[Cell, ...]
    by_rank: Mapping[int, ParamLayout]

    @staticmethod
    def of(mesh: RankMesh, sharding: Sharding, fixed: tuple[str, ...]) -> _Form:
        used = [*fixed, *(axis for split in sharding.splits for axis in split.axes)]
        if len(set(used)) < len(used) or not set(used) <= mesh.sizes.keys():
            raise ValueError(f"cut over {used}, of a mesh with {list(mesh.sizes)}: each axis once")
        spare = [axis for axis, _ in mesh.axes if axis not in used]
        replicas = [mesh.rank(at) for at in _each(mesh, spare)]
        owners: dict[Box, list[int]] = {}
        by_rank = {}
        for at in _each(mesh, [axis for split in sharding.splits for axis in split.axes]):
            boxes = tuple(box for box in local_at(sharding, at, mesh.sizes).boxes if box.elements)
            held = ParamLayout(sharding.shape, sharding.dtype, boxes)
            ranks = sorted(mesh.rank(at) + replica for replica in replicas)
            if boxes:
                by_rank.update(dict.fromkeys(ranks, held))
            for box in boxes:
                owners.setdefault(box, []).extend(ranks)
        cells = tuple(Cell(box, tuple(sorted(owners[box]))) for box in sorted(owners))
        whole = ParamLayout(sharding.shape, sharding.dtype, (Box.whole(sharding.shape),))
        return _Form(whole, cells, by_rank)


def local_at(sharding: Sharding, at: Mapping[str, int], sizes: Mapping[str, int]) -> Local:
    """The tensor of the rank at these coordinates."""
    local = Local((Box.whole(sharding.shape),))
    for split in sharding.splits:
        ranks, index = 1, 0
        for axis in split.axes:
            ranks, index = ranks * sizes[axis], index * sizes[axis] + at[axis]
        parts = ranks if split.parts is None else split.parts
        if ranks % parts:
            raise ValueError(f"{ranks} ranks cannot share {parts} parts evenly")
        index //= ranks // parts
        if split.blocks:
            local = local.chunk_blocks(split.dim, split.blocks, parts, index)
        else:
            local = local.chunk(split.dim, parts, index)
    return local


def _each(mesh: RankMesh, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """All coordinates along some axes."""
    for at in product(*(range(mesh.sizes[axis]) for axis in axes)):
        yield dict(zip(axes, at, strict=True))
