"""The keys of a run, one after another, by simulation: which value is faster, and why.

setup ──▸ split · slots · max_staleness · window · depth ──▸ a change that gains LEAST_GAIN, with its reason
  ▲                                                            │
  └──────────── again, until no key gains any more ◂───────────┘
then younger data, as long as it costs less than LEAST_GAIN
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.telemetry.spans import WAIT
from asyncrl.twin.outcome import Setup, Simulated
from asyncrl.twin.plan import PlannedRun, fetch_times, splits
from asyncrl.twin.simulate import simulate

LEAST_GAIN = 1.02
"""A change must be so many times as fast; less is within the error of a simulation."""

STALENESS = (0, 1, 2, 3, 4, 6, 8)
SLOTS = (0.25, 0.5, 2.0, 4.0)
"""Factors of `generator.slots`."""

VERSIONS, ROUNDS = 20, 3

KEYS: Mapping[str, str] = {
    "generators": "generator.count",
    "data_ranks": "learner.processes",
    "slots": "generator.slots",
    "max_staleness": "queue.max_staleness",
    "window": "queue.window",
    "depth": "queue.depth",
}
"""Fields of `Setup` → keys. A data rank may have several processes: `StageTimes.rank_devices`."""


@dataclass(frozen=True, slots=True)
class Change:
    """One step of the search: fields of the setup with their new values, and the outcomes before and after."""

    fields: Mapping[str, Any]
    before: Simulated
    after: Simulated

    @property
    def gain(self) -> float:
        return self.after.tokens_per_s / self.before.tokens_per_s

    def reason(self) -> str:
        """The wait that it changes most, in words: 'learner waits for groups 31 % → 4 %'."""
        moved = [
            (
                named_waits(self.before, pool).get(name, 0.0),
                named_waits(self.after, pool).get(name, 0.0),
                pool,
                name,
            )
            for pool in ("learner", "generators")
            for name in {*named_waits(self.before, pool), *named_waits(self.after, pool)}
        ]
        if not moved:
            return "neither pool waits"
        was, now, pool, name = max(moved, key=lambda each: (round(each[0] - each[1], 3), each[2], each[3]))
        verb = "waits" if pool == "learner" else "wait"
        return f"{pool} {verb} for {name} {was:.0%} → {now:.0%} of the time"


def named_waits(outcome: Simulated, pool: str) -> dict[str, float]:
    """The named waits of a pool as shares of its time, by what is waited for."""
    found = outcome.shares(pool)
    return {name.removeprefix(WAIT): share for name, share in found.items() if name.startswith(WAIT)}


def tune(job: PlannedRun, devices: int | None = None, seed: int = 0) -> tuple[Simulated, list[Change]]:
    """The outcome of the best setup, and the changes that lead to it from `job.setup`, in their order.

    devices: to be split into generators and data ranks; None: the pools stay as they are
    """
    outcome, changes = _outcome(job, job.setup, seed), list[Change]()
    for _ in range(ROUNDS):
        before = len(changes)
        for axis in _axes(job, outcome.setup, devices):
            found = [(fields, _outcome(job, replace(outcome.setup, **fields), seed)) for fields in axis]
            fields, best = max(found, key=lambda each: each[1].tokens_per_s, default=({}, outcome))
            if best.tokens_per_s >= LEAST_GAIN * outcome.tokens_per_s:
                changes.append(Change(fields, outcome, best))
                outcome = best
        if len(changes) == before:
            break
    return _with_younger_data(job, outcome, changes, seed)


def _with_younger_data(
    job: PlannedRun, outcome: Simulated, changes: list[Change], seed: int
) -> tuple[Simulated, list[Change]]:
    """The least staleness that is as fast."""
    for level in STALENESS:
        if level >= outcome.setup.max_staleness:
            break
        fields: dict[str, Any] = {"max_staleness": level, "window": None, "depth": None}
        younger = _outcome(job, replace(outcome.setup, **fields), seed)
        if younger.tokens_per_s * LEAST_GAIN > outcome.tokens_per_s:
            return younger, [*changes, Change({"max_staleness": level}, outcome, younger)]
    return outcome, changes


def _axes(job: PlannedRun, setup: Setup, devices: int | None) -> Iterator[list[dict[str, Any]]]:
    """The values of each key that are tried, as fields of the setup."""
    if devices is not None:
        yield [
            {"generators": generators, "data_ranks": ranks}
            for generators, ranks in splits(job, devices)
            if (generators, ranks) != (setup.generators, setup.data_ranks)
        ]
    slots = sorted({max(setup.group_size, round(setup.slots * factor)) for factor in SLOTS} - {setup.slots})
    yield [{"slots": value} for value in slots]
    yield [
        {"max_staleness": level, "window": None, "depth": None}
        for level in STALENESS
        if level != setup.max_staleness
    ]
    windows = {1, setup.groups + 1} if setup.max_staleness > 1 else {1}
    yield [{"window": window, "depth": None} for window in sorted(windows - {setup.window_groups})]
    least, most = setup.groups + setup.window_groups - 1, (setup.max_staleness + 1) * setup.groups
    depths = {depth for depth in (least, (least + most) // 2, most) if depth >= least}
    yield [{"depth": depth} for depth in sorted(depths - {setup.depth_groups})]


def _outcome(job: PlannedRun, setup: Setup, seed: int) -> Simulated:
    return simulate(setup, job.times, VERSIONS, seed, fetch_times(job, setup))
