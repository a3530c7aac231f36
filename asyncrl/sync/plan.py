"""Who sends what: from the layouts of the learner's ranks and of one generator to ordered buckets per rank.

    destination boxes ▸ cut to at most a bucket ▸ each to the least loaded rank that holds it ▸ packed

Every byte that the destination needs is sent exactly once. Both ends work through a rank's buckets in the
same order, so the stream carries bytes alone. Boxes are in checkpoint coordinates, which both ends share: one
box names the source and the target of a piece. Pure, no torch; the same layouts give the same plan
everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import WeightSyncError, WireError
from asyncrl.sync.layout import ITEM_BYTES, Box, Layout, ParamLayout

ALIGN = 16
"""Bytes: where a piece may start in a bucket, so that it can be viewed in its dtype."""

ALONE = 8
"""A piece of at least 1/ALONE of a bucket travels alone: both ends then move it without a copy."""


@dataclass(frozen=True, slots=True)
class Piece:
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
    """What one learner rank sends to one destination, in order."""

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


def plan(sources: Sequence[Layout], destination: Layout, bucket_bytes: int) -> Plan:
    """Cover `destination` from `sources` (by rank), replicas sharing the load, in buckets of at most
    `bucket_bytes`.

    Raises WeightSyncError, naming the parameter, where no rank holds what is needed or where shape or dtype
    differ.
    """
    if bucket_bytes < ALIGN:
        raise ValueError(f"a bucket of {bucket_bytes} bytes is below the least of {ALIGN}")
    load = [0] * len(sources)
    parts: list[list[tuple[str, Box]]] = [[] for _ in sources]
    # Large parameters first: what is left to even out the ranks' loads is then small.
    for name in sorted(destination, key=lambda name: (-destination[name].bytes, name)):
        needed = destination[name]
        item = ITEM_BYTES[needed.dtype]
        held = _holders(name, needed, sources)
        for box in needed.boxes:
            for region in split(box, bucket_bytes // item):
                for rank, part in _cover(name, region, held, load, item):
                    parts[rank].append((name, part))
    return Plan(
        tuple(
            SourcePlan(rank, _pack(sorted(ranked), destination, bucket_bytes))
            for rank, ranked in enumerate(parts)
            if ranked
        )
    )


def split(box: Box, most: int) -> Iterator[Box]:
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
        yield from split(Box(tuple(offsets), tuple(shape)), most)


def _holders(name: str, needed: ParamLayout, sources: Sequence[Layout]) -> list[tuple[int, Box]]:
    """(rank, box) of everything that is held of a parameter."""
    held = []
    for rank, source in enumerate(sources):
        param = source.get(name)
        if param is None or not param.boxes:
            continue
        for what, here, there in (
            ("shape", needed.shape, param.shape),
            ("dtype", needed.dtype, param.dtype),
        ):
            if here != there:
                raise WeightSyncError(
                    f"parameter {name}: the generator needs {what} {here}, learner rank {rank} has {there}"
                )
        held += [(rank, box) for box in param.boxes]
    return held


def _cover(
    name: str, region: Box, held: Sequence[tuple[int, Box]], load: list[int], item: int
) -> Iterator[tuple[int, Box]]:
    """Parts of `region`, each with the least loaded rank that holds it; counts them into `load`."""
    missing = [region]
    while missing:
        part = missing.pop()
        common = [(rank, both) for rank, box in held if (both := box.intersection(part))]
        if not common:
            raise WeightSyncError(
                f"parameter {name}: no learner rank holds offsets {part.offsets}, shape {part.shape}"
            )
        rank, best = min(common, key=lambda c: (load[c[0]], -c[1].elements, c[0], c[1]))
        load[rank] += best.elements * item
        missing += part.minus(best)
        yield rank, best


def _pack(parts: Sequence[tuple[str, Box]], layout: Layout, bucket_bytes: int) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    filling: list[Piece] = []
    at = 0
    for name, box in parts:
        size = box.elements * ITEM_BYTES[layout[name].dtype]
        if size * ALONE >= bucket_bytes:
            buckets.append(Bucket((Piece(name, box, 0, size),)))
            continue
        if at + size > bucket_bytes:
            buckets.append(Bucket(tuple(filling)))
            filling, at = [], 0
        filling.append(Piece(name, box, at, size))
        at += -(-size // ALIGN) * ALIGN
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
    """What this rank is asked to send; raises WireError unless `layout`, its own, holds every piece of it."""
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
