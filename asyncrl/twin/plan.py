"""The best split of N devices: simulated for the splits that the bound of the stage times puts first, in each mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from asyncrl.sync.plan.cost_model import Speeds
from asyncrl.sync.plan.tree import Links, Member, assign, predict
from asyncrl.twin.outcome import Setup, Simulated, bound
from asyncrl.twin.simulate import simulate
from asyncrl.twin.times import StageTimes

TRIED = 4
"""Splits of one mode that are simulated: those with the highest bounds."""

EVENTS, FEWEST, MOST = 400_000, 6, 30
"""About the events of one simulation, and its versions at least and at most."""

OF_A_VERSION = 8
"""Events of one generator for each version, beside its rollouts."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run without its pools.

    setup: its sizes; the pools and max_staleness in it are replaced · max_staleness: the highest that is tried
    rank_multiple: divides the data ranks, for copies of a sharded model and for ranks with different experts
    """

    setup: Setup
    times: StageTimes
    speeds: Speeds
    max_staleness: int
    rank_multiple: int = 1
    bucket_bytes: int = 64 << 20
    host_devices: int = 8


def search(job: PlannedRun, devices: int, seed: int = 0) -> list[Simulated]:
    """Outcomes of the splits that were simulated, the fastest first; empty if the devices hold no run."""
    found: list[Simulated] = []
    for candidates in _candidates(job, devices):
        for setup in sorted(candidates, key=lambda each: -expected_bound(each, job.times))[:TRIED]:
            events = setup.groups * setup.group_size + OF_A_VERSION * setup.generators
            versions = min(MOST, max(FEWEST, EVENTS // events))
            found.append(simulate(setup, job.times, versions, seed, fetch_times(job, setup)))
    return sorted(found, key=lambda outcome: -outcome.groups_per_s)


def _candidates(job: PlannedRun, devices: int) -> Iterator[list[Setup]]:
    """The setups of each mode."""
    levels = [0, 1, *([max(2, job.max_staleness)] if job.max_staleness != 1 else [])]
    ways = splits(job, devices)
    for level in levels:
        yield [_spread(job.setup, generators, ranks, level) for generators, ranks in ways]
    generators = devices // job.times.generator_devices
    ranks = max((r for r in _rank_counts(job) if r * job.times.rank_devices <= devices), default=0)
    if generators and ranks:
        yield [replace(_spread(job.setup, generators, ranks, 0), colocated=True)]


def _spread(setup: Setup, generators: int, ranks: int, level: int) -> Setup:
    """Pools of this size. A generator leases as much as its slots take: with more slots than its share of the groups
    under way, some take the work of others."""
    setup = replace(
        setup,
        generators=generators,
        data_ranks=ranks,
        max_staleness=level,
        window=None,
        depth=None,
        colocated=False,
    )
    share = -(-(setup.spare_versions + 1) * setup.groups // generators)
    return replace(setup, slots=min(setup.slots, share * setup.group_size))


def splits(job: PlannedRun, devices: int) -> list[tuple[int, int]]:
    """(generators, data ranks) of two pools: whole generators, and ranks that divide the groups of a version."""
    of_one, of_rank = job.times.generator_devices, job.times.rank_devices
    ways = [((devices - ranks * of_rank) // of_one, ranks) for ranks in _rank_counts(job)]
    return [(generators, ranks) for generators, ranks in ways if generators > 0]


def expected_bound(setup: Setup, times: StageTimes) -> float:
    """The bound in groups per second, from mean lengths."""
    tokens, learner = times.lengths.mean() * setup.group_size, times.learner
    of_a_rank = setup.groups / setup.data_ranks * (tokens + times.lengths.prompt * setup.group_size)
    learn_s = learner.version_s + learner.publish_s + learner.claim_s + learner.token_s * of_a_rank
    return bound(setup, times, tokens * setup.groups, learn_s)


def fetch_times(job: PlannedRun, setup: Setup) -> list[float] | None:
    """Seconds until each generator has a version: the tree of the weight stream, if `sync.model_gb` is given. Sends and
    receipts count as even over the ranks, as `asyncrl sync plan` finds them but for a few percent."""
    sync, of_one = job.times.sync, job.times.generator_devices
    if not sync.model_gb or setup.colocated:
        return None
    ranks = setup.data_ranks * job.times.rank_devices
    links = Links(
        job.speeds.network * ranks, job.speeds.network * of_one, job.speeds.local * of_one, job.speeds.hop_s
    )
    on_host = max(1, job.host_devices // of_one)
    members = [Member(f"generator-{i}", f"host-{i // on_host}", "") for i in range(setup.generators)]
    sizes, bucket = {"": round(sync.model_gb * 1e9)}, job.bucket_bytes * of_one
    seconds = predict(members, assign(members, sizes, bucket, links), sizes, bucket, links)
    return [seconds[member.who] for member in members]


def _rank_counts(job: PlannedRun) -> list[int]:
    groups = job.setup.groups
    return [ranks for ranks in range(job.rank_multiple, groups + 1, job.rank_multiple) if groups % ranks == 0]
