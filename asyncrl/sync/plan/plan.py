"""The plan of a transfer: from the layouts of the learner's ranks and of one generator to ordered buckets per rank.

    destination boxes ▸ cut where their owners change, and to a bucket ▸ each to its least loaded owner ▸ packed

Every byte that the destination needs is sent exactly once. Both ends work through a rank's buckets in the
same order, so the stream carries bytes alone. Boxes are in checkpoint coordinates, which both ends share: one
box names the source and the target of a piece. Pure, no torch; the same layouts give the same plan
everywhere.

Thousands of parameters are cut alike (the experts of a mixture), so each way of cutting is worked out once.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl.errors import WeightSyncError, WireError
from asyncrl.sync.layout.layout import (
    ITEM_BYTES,
    Box,
    Cell,
    Layout,
    Owners,
    OwnersOf,
    are_disjoint,
    layout_key,
)

ALIGN = 16
"""Bytes: where a piece may start in a bucket, so that it can be viewed in its dtype."""

ALONE = 16
"""A piece of at least 1/ALONE of a bucket travels alone: both ends then move it without a copy."""


def aligned(size: int) -> int:
    """Rounded up to the next place where a piece may start."""
    return -(-size // ALIGN) * ALIGN


class Piece(NamedTuple):
    """`box` of the parameter `name`, at bytes [at, at + bytes) of its bucket. One source and one destination
    box contain it whole."""

    name: str
    box: Box
    at: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message of the stream."""

    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        """Bytes of the message, gaps between pieces included."""
        return self.pieces[-1].at + self.pieces[-1].bytes


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """The buckets from one learner rank to one destination, in order."""

    rank: int
    buckets: tuple[Bucket, ...]

    @property
    def pieces(self) -> Iterator[Piece]:
        return (piece for bucket in self.buckets for piece in bucket.pieces)

    @property
    def bytes(self) -> int:
        """Bytes of parameters, without gaps."""
        return sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Plan:
    """One `SourcePlan` for each learner rank that sends anything, by rank."""

    sources: tuple[SourcePlan, ...]

    @property
    def bytes(self) -> int:
        return sum(source.bytes for source in self.sources)


def plan(sources: Sequence[Layout] | Owners, destination: Layout, bucket_bytes: int) -> Plan:
    """Cover `destination` from `sources` (by rank), replicas sharing the load, in buckets of at most
    `bucket_bytes`.

    Raises WeightSyncError, naming the parameter, if no rank holds a needed box, or if shape or dtype differ.
    """
    if bucket_bytes < ALIGN:
        raise ValueError(f"a bucket of {bucket_bytes} bytes is below the least of {ALIGN}")
    owners = OwnersOf(sources) if isinstance(sources, Sequence) else sources
    with _collector_at_rest():
        return _planned(owners, destination, bucket_bytes)


def _planned(owners: Owners, destination: Layout, bucket_bytes: int) -> Plan:
    cut = _Cutter(bucket_bytes)
    load: dict[int, int] = defaultdict(int)
    by_rank: dict[int, list[Part]] = defaultdict(list)
    choices: list[tuple[Part, list[int]]] = []
    # Large parameters first: the small ones then even out the loads of the ranks.
    for name in sorted(destination, key=lambda name: (-destination[name].bytes, name)):
        needed = destination[name]
        held = owners.held(name, needed)
        first = held.first
        for box, size, ranks in cut(name, needed.boxes, held.cells, ITEM_BYTES[needed.dtype]):
            if len(ranks) > 1:
                choices.append(((name, box, size), [first + rank for rank in ranks]))
            else:
                load[first + ranks[0]] += size
                by_rank[first + ranks[0]].append((name, box, size))
    for part, able in choices:
        rank = min(able, key=load.__getitem__)
        load[rank] += part[2]
        by_rank[rank].append(part)
    return Plan(
        tuple(SourcePlan(rank, _pack(sorted(by_rank[rank]), bucket_bytes)) for rank in sorted(by_rank))
    )


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """A plan is many small objects and no cycles: searching them for garbage takes longer than making them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


Part = tuple[str, Box, int]
"""A parameter's name, a box of it, the bytes of that box."""


class Plans:
    """Remembers the last plans by the layouts of both ends, so that a generator that comes back, or joins beside a
    replica, gets its plan at once. Thread-safe."""

    def __init__(self, most: int = 8) -> None:
        self.made = 0
        self._most = most
        self._plans: dict[tuple[str, str, int], Plan] = {}

    def __call__(self, sources: Sequence[Layout], destination: Layout, bucket_bytes: int) -> Plan:
        """See `plan`."""
        owners = OwnersOf(sources)
        key = (owners.key, layout_key(destination), bucket_bytes)
        found = self._plans.pop(key, None)
        if found is None:
            self.made += 1
            found = plan(owners, destination, bucket_bytes)
        self._plans[key] = found  # the newest last
        for old in list(self._plans)[: -self._most]:
            self._plans.pop(old, None)
        return found


class _Share(NamedTuple):
    """A box with the same owners everywhere, at most a bucket. ranks: less the `first` of the parameter."""

    box: Box
    bytes: int
    ranks: tuple[int, ...]


class _Cutter:
    """Cuts needed boxes where their owners change, and to the size of a bucket; each combination once."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        # By the identity of the cells, which are kept, since parameters that are cut alike share them.
        self._known: dict[tuple[int, tuple[Box, ...], int], tuple[tuple[Cell, ...], list[_Share]]] = {}

    def __call__(
        self, name: str, needed: tuple[Box, ...], cells: tuple[Cell, ...], item: int
    ) -> list[_Share]:
        key = (id(cells), needed, item)
        if key not in self._known:
            disjoint = are_disjoint([cell.box for cell in cells])
            shares = [
                _Share(small, small.elements * item, ranks)
                for box in needed
                for part, ranks in _regions(name, box, cells, disjoint)
                for small in split_box(part, self._bucket_bytes // item)
            ]
            self._known[key] = (cells, shares)
        return self._known[key][1]


_Region = tuple[Box, tuple[int, ...]]
"""A box and the ranks that hold all of it."""


def _regions(name: str, needed: Box, cells: Sequence[Cell], disjoint: bool) -> list[_Region]:
    """Disjoint boxes that cover `needed`, each with everyone who holds it."""
    common = [(both, cell.ranks) for cell in cells if (both := cell.box.intersection(needed))]
    regions = common if disjoint else _overlaid(common)
    if sum(box.elements for box, _ in regions) < needed.elements:
        missing = [needed]
        for box, _ in regions:
            missing = [rest for part in missing for rest in part.minus(box)]
        raise WeightSyncError(
            f"parameter {name}: no learner rank holds offsets {missing[0].offsets}, shape {missing[0].shape}"
        )
    return regions


def _overlaid(held: Sequence[_Region]) -> list[_Region]:
    """Boxes that may overlap → disjoint ones, the ranks of all that lie there joined."""
    regions: list[_Region] = []
    for box, ranks in held:
        new = [box]
        kept = []
        for other, others in regions:
            if (both := other.intersection(box)) is None:
                kept.append((other, others))
                continue
            kept += [(rest, others) for rest in other.minus(box)]
            kept.append((both, tuple(sorted({*others, *ranks}))))
            new = [rest for part in new for rest in part.minus(both)]
        regions = kept + [(part, ranks) for part in new]
    return regions


def split_box(box: Box, most: int) -> Iterator[Box]:
    """Cut a box along its leading axes into boxes of at most `most` elements; an empty one gives none."""
    if box.elements <= most:
        if box.elements:
            yield box
        return
    axis = next(d for d, size in enumerate(box.shape) if size > 1)
    rows = max(1, most // (box.elements // box.shape[axis]))
    for start in range(0, box.shape[axis], rows):
        offsets, shape = list(box.offsets), list(box.shape)
        offsets[axis] += start
        shape[axis] = min(rows, box.shape[axis] - start)
        yield from split_box(Box(tuple(offsets), tuple(shape)), most)


def tiles(layout: Layout, most_bytes: int) -> Iterator[tuple[str, Box]]:
    """The boxes of a rank with the names of their parameters, cut into boxes of at most `most_bytes`."""
    for name, param in layout.items():
        for box in param.boxes:
            for tile in split_box(box, max(1, most_bytes // ITEM_BYTES[param.dtype])):
                yield name, tile


def _pack(parts: Sequence[Part], bucket_bytes: int) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    filling: list[Piece] = []
    at = 0
    for name, box, size in parts:
        if size * ALONE >= bucket_bytes:
            buckets.append(Bucket((Piece(name, box, 0, size),)))
            continue
        if at + size > bucket_bytes:
            buckets.append(Bucket(tuple(filling)))
            filling, at = [], 0
        filling.append(Piece(name, box, at, size))
        at += aligned(size)
    if filling:
        buckets.append(Bucket(tuple(filling)))
    return tuple(buckets)


def source_to_wire(source: SourcePlan) -> list[Any]:
    """Plain msgpack-able values: buckets of [name, offsets, shape, at]."""
    return [
        [[p.name, list(p.box.offsets), list(p.box.shape), p.at] for p in bucket.pieces]
        for bucket in source.buckets
    ]


def source_from_wire(value: Any, rank: int, layout: Layout) -> SourcePlan:
    """The plan in a request to this rank. Raises WireError unless `layout`, its own, holds every piece of it."""
    try:
        buckets = tuple(
            Bucket(tuple(_held_piece(name, Box(tuple(o), tuple(s)), at, layout) for name, o, s, at in pieces))
            for pieces in value
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"not a plan for learner rank {rank}: {error!r}") from error
    for bucket in buckets:
        ends = [0] + [piece.at + piece.bytes for piece in bucket.pieces]
        if not bucket.pieces or any(p.at < end for p, end in zip(bucket.pieces, ends, strict=False)):
            raise WireError(f"not a plan for learner rank {rank}: a bucket is empty or its pieces overlap")
    return SourcePlan(rank, buckets)


def _held_piece(name: str, box: Box, at: int, layout: Layout) -> Piece:
    param = layout[name]
    item = ITEM_BYTES[param.dtype]
    if len(box.shape) != len(param.shape) or not any(held.contains(box) for held in param.boxes):
        raise ValueError(f"{name} {box} is not held here")
    if at % ALIGN:
        raise ValueError(f"{name} at byte {at} is not aligned to {ALIGN}")
    return Piece(name, box, at, box.elements * item)
