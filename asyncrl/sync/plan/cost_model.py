"""The cost of a weight update, from shapes alone: `asyncrl sync plan`.

    shapes, 'fsdp 64 tp 8' ──▸ layouts of the learner's ranks ─┐
    shapes, '64 tp 8' ───────▸ layouts of one generator's ranks ┴▸ a plan for each ▸ bytes ▸ tree ▸ seconds

Generators of one layout share its plan. Pure, no torch: hundreds of ranks and tens of thousands of parameters take
seconds.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from asyncrl.sync.layout.layout import ITEM_BYTES
from asyncrl.sync.layout.predicted_sharding import Heads, Plane, Shapes, mesh_layout
from asyncrl.sync.layout.sharding import MeshLayout, RankMesh
from asyncrl.sync.plan.plan import plan
from asyncrl.sync.plan.tree import Links, Member, assign, depths, predict

LEARNER_WORDS = ("replicate", "fsdp", "tp", "ep")
GENERATOR_WORDS = ("tp", "ep", "host")


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The parallelism of a learner or of generators. ep: groups of the fsdp ranks of a learner, or of the tp ranks of a
    generator, that hold different experts · host: ranks of a generator machine."""

    count: int = 1
    replicate: int = 1
    fsdp: int = 1
    tp: int = 1
    ep: int = 1
    host: int = 8


@dataclass(frozen=True, slots=True)
class ModelCost:
    shapes: Shapes
    heads: Heads


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes per second of one rank: to other machines, and to others on its own; seconds of one more hop."""

    network: float
    local: float
    hop_s: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Bytes: least, mean and most of some ranks."""

    least: int
    mean: float
    most: int

    @property
    def unevenness(self) -> float:
        """1.0: all alike."""
        return self.most / self.mean if self.mean else 1.0

    @staticmethod
    def of(values: Sequence[int]) -> Spread:
        return Spread(min(values), fmean(values), max(values))


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """The cost of one version.

    sent: by learner ranks to one generator · received: by ranks of a generator · held: by learner ranks, as each
    snapshot has it · streams, buckets: into one generator · direct: generators that take from the learner · hops: of
    the last one · first_s, last_s: until one has it all
    """

    parameters: int
    bytes: int
    learner_ranks: int
    generators: int
    generator_ranks: int
    sent: Spread
    received: Spread
    held: Spread
    streams: int
    buckets: int
    direct: int
    hops: int
    first_s: float
    last_s: float


def parse_learner(words: str) -> PoolShape:
    """'replicate 2 fsdp 64 tp 8 ep 16' in any order; what is missing is 1. Raises ValueError."""
    pool = PoolShape(**_pairs(words, words, LEARNER_WORDS))
    if pool.fsdp % pool.ep:
        raise ValueError(f"{words!r}: ep {pool.ep} must divide fsdp {pool.fsdp}")
    return pool


def parse_generators(words: str) -> PoolShape:
    """'64 tp 8 ep 8 host 8': so many generators of so many ranks. Raises ValueError."""
    count, _, rest = words.strip().partition(" ")
    if not count.isdigit() or int(count) < 1:
        raise ValueError(f"{words!r}: say how many generators first, e.g. '64 tp 8'")
    pool = PoolShape(count=int(count), **_pairs(words, rest, GENERATOR_WORDS))
    if pool.tp % pool.ep:
        raise ValueError(f"{words!r}: ep {pool.ep} must divide tp {pool.tp}")
    return pool


def _pairs(words: str, pairs: str, known: Sequence[str]) -> dict[str, int]:
    found = re.findall(r"(\w+)\s+(\d+)", pairs)
    clean = " ".join(f"{word} {count}" for word, count in found) == " ".join(pairs.split())
    if (
        not clean
        or not {word for word, _ in found} <= set(known)
        or any(int(count) < 1 for _, count in found)
    ):
        raise ValueError(f"{words!r}: pairs of a word and a number above 0, words: {', '.join(known)}")
    return {word: int(count) for word, count in found}


def learner_layout(model: ModelCost, pool: PoolShape) -> MeshLayout:
    """FSDP2 over tensor parallelism, whole experts dealt out to ep; experts are cut by the rest of fsdp."""
    axes = (("replicate", pool.replicate), ("fsdp", pool.fsdp // pool.ep), ("ep", pool.ep), ("tp", pool.tp))
    plane = Plane(tp=("tp",), fsdp=("fsdp", "ep"), ep=("ep",), expert_tp=("tp",), expert_fsdp=("fsdp",))
    return mesh_layout(model.shapes, RankMesh(axes), plane, model.heads)


def generator_layout(model: ModelCost, pool: PoolShape) -> MeshLayout:
    """One generator: tensor parallelism, experts dealt out to ep and cut by the rest of tp."""
    plane = Plane(tp=("ep", "tp"), ep=("ep",), expert_tp=("tp",))
    mesh = RankMesh((("ep", pool.ep), ("tp", pool.tp // pool.ep)))
    return mesh_layout(model.shapes, mesh, plane, model.heads)


def forecast(
    model: ModelCost,
    learner: PoolShape,
    generators: PoolShape,
    bucket_bytes: int,
    speeds: Speeds,
    fanout: int | None = None,
) -> CostEstimate:
    """Plan one update. Raises ValueError where the experts cannot be dealt out evenly."""
    here, there = learner_layout(model, learner), generator_layout(model, generators)
    sent: Counter[int] = Counter()
    received, streams, buckets = [], 0, 0
    for rank in range(there.mesh.ranks):
        made = plan(here, there.rank(rank), bucket_bytes)
        sent.update({source.rank: source.bytes for source in made.sources})
        received.append(made.bytes)
        streams += len(made.sources)
        buckets += sum(len(source.buckets) for source in made.sources)
    sends = Spread.of([sent[rank] for rank in range(here.mesh.ranks)])
    takes = Spread.of(received)
    # The slowest rank decides: a pool is as fast as its ranks together would be if all had as much to do.
    links = Links(
        learner=sum(received) / max(sends.most, 1) * speeds.network,
        member=sum(received) / max(takes.most, 1) * speeds.network,
        local=sum(received) / max(takes.most, 1) * speeds.local,
        hop_s=speeds.hop_s,
    )
    on_host = max(1, generators.host // generators.tp)
    members = [Member(f"generator-{i}", f"host-{i // on_host}", "") for i in range(generators.count)]
    sizes = {"": sum(received)}
    parents = assign(members, sizes, bucket_bytes * generators.tp, links, fanout)
    seconds = predict(members, parents, sizes, bucket_bytes * generators.tp, links).values()
    return CostEstimate(
        parameters=len(model.shapes),
        bytes=sum(math.prod(shape) * ITEM_BYTES[dtype] for shape, dtype in model.shapes.values()),
        learner_ranks=here.mesh.ranks,
        generators=generators.count,
        generator_ranks=there.mesh.ranks,
        sent=sends,
        received=takes,
        held=Spread.of(here.bytes_by_rank()),
        streams=streams,
        buckets=buckets,
        direct=sum(parent is None for parent in parents.values()),
        hops=max(depths(parents).values()),
        first_s=min(seconds),
        last_s=max(seconds),
    )
