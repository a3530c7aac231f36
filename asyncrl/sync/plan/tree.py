"""The tree of relays: replicas of one layout hand a version on to each other, bucket by bucket.

    learner ─▸ host A ─▸ host C ─▸ …        the wire to a host is crossed once; members on one
        │        └─▸ second member of A     host take it from each other
        └────▸ host B ─▸ host D ─▸ …

Members of one layout form a forest: so many roots at the learner, so many children at every member. The shape is the
one that ends first by the model below, for the number of hosts rounded up to a power of two; all direct where that is
hardly slower, since a parent may die. The order of the members is their place in a complete forest, breadth first, so
a member that joins at the end moves no other, and `leave` fills a hole with one other member.

Time of a pipelined path: bytes over the slowest edge, and one bucket more for each further hop. An edge has its share
of what its upper end sends. Pure: the same members give the same forest everywhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Parents = dict[str, str | None]
"""The parent of each member by name; None: the learner."""

FANOUTS = (1, 2, 3, 4, 8)
MOST_ROOTS = 8
"""On its own host a member serves at most so many others directly."""

DIRECT_SLACK = 1.1
"""All direct may take so many times as long as the fastest forest."""


@dataclass(frozen=True, slots=True)
class Member:
    """`layout`: a key that is the same for members that need the same boxes, as `layout.layout_key` makes it."""

    who: str
    host: str
    layout: str


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes per second, and the seconds that one more hop costs beside its bucket."""

    learner: float  # what all learner ranks together send
    member: float  # what one member receives, and what it sends, over the network
    local: float  # what one member sends to others on its host
    hop_s: float = 0.002

    def __post_init__(self) -> None:
        if min(self.learner, self.member, self.local) <= 0 or self.hop_s < 0:
            raise ValueError(f"speeds must be above 0, hop_s at least 0: {self}")


@dataclass(frozen=True, slots=True)
class ForestShape:
    """A complete forest: `roots` of them at its source, `fanout` children at each member."""

    roots: int
    fanout: int

    def parent(self, place: int) -> int | None:
        """The place above; None for a root."""
        return None if place < self.roots else (place - self.roots) // self.fanout

    def depth(self, members: int) -> int:
        """Hops from the source to the lowest of so many members."""
        hops, last = 0, members - 1
        while last >= 0:
            hops, last = hops + 1, -1 if (above := self.parent(last)) is None else above
        return hops


def assign(
    members: Sequence[Member],
    sizes: Mapping[str, int],
    bucket_bytes: int,
    links: Links,
    fanout: int | None = None,
) -> Parents:
    """The parent of each member, whose order is their place.

    sizes: bytes of a version by layout · fanout: children of each and roots at the learner; None: by time.
    Raises ValueError for two members of one name, KeyError for a layout without a size.
    """
    if len({member.who for member in members}) < len(members):
        raise ValueError(f"members of one name: {sorted(member.who for member in members)}")
    parents: Parents = {}
    for layout, group in _grouped(members, lambda member: member.layout).items():
        size, share = sizes[layout], _share(layout, members, sizes)
        hosts = _by_host(group)
        heads = [names[0] for names in hosts]
        speeds = _Speeds(links.learner * share, links.member, links.hop_s)
        parents |= _forest(heads, None, _shape(len(heads), size, bucket_bytes, speeds, fanout))
        speeds = _Speeds(links.local, links.local, links.hop_s)
        for head, *others in hosts:
            parents |= _forest(
                others, head, _shape(len(others), size, bucket_bytes, speeds, fanout, MOST_ROOTS)
            )
    return parents


def leave(members: Sequence[Member], who: str) -> list[Member]:
    """The members without `who`, in an order in which few others change their parents.

    The last on its host takes the place; for one who was alone there, the first of the last host.
    """
    place = next(i for i, member in enumerate(members) if member.who == who)
    gone = members[place]
    group = [member for member in members if member.layout == gone.layout]
    near = [member for member in group if member.host == gone.host]
    last = near[-1].who if len(near) > 1 else _by_host(group)[-1][0]
    if last == who:
        return [member for member in members if member.who != who]
    heir = next(member for member in group if member.who == last)
    return [heir if member.who == who else member for member in members if member.who != last]


def predict(
    members: Sequence[Member],
    parents: Mapping[str, str | None],
    sizes: Mapping[str, int],
    bucket_bytes: int,
    links: Links,
) -> dict[str, float]:
    """Seconds from the first byte until each member has the whole version."""
    by_name = {member.who: member for member in members}
    edges = {
        who: _Edge(parent, parent is not None and by_name[who].host == by_name[parent].host)
        for who, parent in parents.items()
    }
    load: Counter[_Edge] = Counter()  # bytes that each end sends over the network, and on its host
    for who, edge in edges.items():
        load[edge] += sizes[by_name[who].layout]
    rates: dict[str, float] = {}  # of the slowest edge from the learner down to here
    delays: dict[str, float] = {}  # of the hops above, in seconds
    for who in _downwards(parents):
        edge, size = edges[who], sizes[by_name[who].layout]
        sends = links.local if edge.local else links.member if edge.parent else links.learner
        rate = sends * size / load[edge] if size else sends
        rate = rate if edge.local else min(rate, links.member)
        if edge.parent is None:
            rates[who], delays[who] = rate, 0.0
        else:
            rates[who] = min(rate, rates[edge.parent])
            delays[who] = delays[edge.parent] + min(bucket_bytes, size) / rates[who] + links.hop_s
    return {who: sizes[by_name[who].layout] / rates[who] + delays[who] for who in parents}


class _Edge(NamedTuple):
    """A link that the streams from one end to all its children of one kind share."""

    parent: str | None
    local: bool


def depths(parents: Mapping[str, str | None]) -> dict[str, int]:
    """Hops from the learner; 1 for its direct children."""
    hops: dict[str, int] = {}
    for who in _downwards(parents):
        above = parents[who]
        hops[who] = 1 if above is None else hops[above] + 1
    return hops


def _downwards(parents: Mapping[str, str | None]) -> list[str]:
    """All, each after its parent."""
    children: dict[str | None, list[str]] = {}
    for who, parent in parents.items():
        children.setdefault(parent, []).append(who)
    order = list(children.get(None, []))
    for who in order:  # grows while it is walked
        order += children.get(who, [])
    return order


class _Speeds(NamedTuple):
    """Bytes per second that the source of a forest sends, and each of its nodes; seconds of a hop."""

    source: float
    node: float
    hop_s: float


def _shape(
    count: int,
    size: int,
    bucket_bytes: int,
    speeds: _Speeds,
    fanout: int | None,
    most_roots: int | None = None,
) -> ForestShape:
    """The forest of `count` members that ends first, or all direct where that is hardly slower."""
    if fanout is not None:
        return ForestShape(fanout, fanout)
    count = 1 << max(count - 1, 0).bit_length()

    def seconds(shape: ForestShape) -> float:
        depth = shape.depth(count)
        rate = min(speeds.node, speeds.source / shape.roots)
        if depth > 1:
            rate = min(rate, speeds.node / shape.fanout)
        return size / rate + (depth - 1) * (min(bucket_bytes, size) / rate + speeds.hop_s)

    roots = [1 << power for power in range(min(count, most_roots or count).bit_length())]
    shapes = [ForestShape(root, k) for root in roots for k in FANOUTS]
    best = min(shapes, key=lambda shape: (seconds(shape), shape.depth(count), shape.fanout))
    direct = ForestShape(count, 1)
    return direct if roots[-1] == count and seconds(direct) <= DIRECT_SLACK * seconds(best) else best


def _forest(names: Sequence[str], source: str | None, shape: ForestShape) -> Parents:
    above = (shape.parent(place) for place in range(len(names)))
    return {who: source if place is None else names[place] for who, place in zip(names, above, strict=True)}


def _share(layout: str, members: Iterable[Member], sizes: Mapping[str, int]) -> float:
    """The layout's share of the learner's bytes; layouts are served at the same time."""
    total = math.fsum(sizes[other] for other in {member.layout for member in members})
    return sizes[layout] / total if sizes[layout] else 1.0


def _by_host(members: Iterable[Member]) -> list[list[str]]:
    """The names of the members of each host."""
    hosts = _grouped(members, lambda member: member.host).values()
    return [[member.who for member in group] for group in hosts]


def _grouped(members: Iterable[Member], key: Callable[[Member], str]) -> dict[str, list[Member]]:
    groups: dict[str, list[Member]] = {}
    for member in members:
        groups.setdefault(key(member), []).append(member)
    return groups
