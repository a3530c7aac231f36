"""`asyncrl plan`: the best split of so many devices into generators and learner ranks, as a table or as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.config.sections.placement import COLOCATED
from asyncrl.config.yaml_values import one_line
from asyncrl.errors import ConfigError
from asyncrl.launch.folder.run_folder import find_run
from asyncrl.learner.training.requirements import claim_tokens, whole_batch
from asyncrl.sync.plan.cost_model import Speeds
from asyncrl.twin.calibrate import calibrate, check_one_kind, generator_devices, rank_devices
from asyncrl.twin.outcome import Setup, Simulated
from asyncrl.twin.plan import PlannedRun, search
from asyncrl.twin.times import StageTimes, read_times

WORTH = 1.05
"""Asynchrony must be so many times as fast as the best synchronous way to be worth stale data."""

POOLS = ("generators", "learner")

IDLE = 0.25
"""A pool that is busy for less of the time has more devices than the run can fill."""


COLUMNS = (
    "mode",
    "generators",
    "slots",
    "data ranks",
    "groups/s",
    "bound",
    "tokens/s",
    "generators busy",
    "learner busy",
    "staleness",
    "pauses",
)


def stage_times(run: str | None, file: str | None) -> StageTimes:
    """The stage times of a run, or of a file.

    Raises ConfigError unless exactly one is given, and as the readers of both do.
    """
    if (run is None) == (file is None):
        rule = "stage times come from a short run or from a file, and from one of them"
        raise ConfigError(
            "--from or --times", run and file, rule, "give --from RUN, or --times FILE as docs/twin.md has it"
        )
    return read_times(Path(file)) if file is not None else calibrate(find_run(str(run)))


def job(config: Config, times: StageTimes) -> PlannedRun:
    """Raises ConfigError where the times are of pools with another parallelism than the configuration's."""
    for key, of_times, here in (
        ("generator_devices", times.generator_devices, generator_devices(config)),
        ("rank_devices", times.rank_devices, rank_devices(config)),
    ):
        if of_times != here:
            what = "generator" if key == "generator_devices" else "data rank of the learner"
            rule = f"the configuration has {here} devices for one {what}, whose times differ"
            raise ConfigError(f"times.{key}", of_times, rule, "calibrate with a run of this parallelism")
    return PlannedRun(
        setup=setup_of(config),
        times=times,
        speeds=Speeds(config.sync.network_gb_s * 1e9, config.sync.local_gb_s * 1e9, config.sync.hop_ms / 1e3),
        max_staleness=config.queue.max_staleness,
        rank_multiple=config.learner.parallel.replicate * config.learner.parallel.expert,
        bucket_bytes=config.sync.bucket_bytes,
    )


def setup_of(config: Config) -> Setup:
    """The run as it is configured. Raises ConfigError for generators of several kinds."""
    check_one_kind(config)
    return Setup(
        groups=config.batch.groups,
        group_size=config.batch.group_size,
        generators=config.generator.count,
        slots=config.generator.slots,
        data_ranks=max(1, config.learner.processes // rank_devices(config)),
        max_staleness=config.queue.max_staleness,
        window=config.queue.window,
        depth=config.queue.depth,
        claim_tokens=claim_tokens(config),
        whole_batch=whole_batch(config),
    )


def worth(outcomes: Sequence[Simulated]) -> str:
    """Whether asynchrony helps, in one sentence, with both figures."""
    synchronous = next((each for each in outcomes if each.setup.max_staleness == 0), None)
    overlapping = next((each for each in outcomes if each.setup.max_staleness > 0), None)
    if synchronous is None or overlapping is None:
        return "asynchrony needs two pools: these devices hold one generator or one learner rank alone"
    ratio = overlapping.groups_per_s / synchronous.groups_per_s
    figures = (
        f"{overlapping.groups_per_s:.4g} groups/s ({overlapping.setup.mode}) against "
        f"{synchronous.groups_per_s:.4g} ({synchronous.setup.mode}), {ratio:.2f} x"
    )
    if ratio < WORTH:
        return f"asynchrony will not help you: {figures}"
    return f"asynchrony helps: {figures}"


def recommended(outcomes: Sequence[Simulated]) -> Simulated:
    """The fastest; of those that are as fast but for WORTH, one with the least staleness."""
    fast = [each for each in outcomes if each.groups_per_s * WORTH > outcomes[0].groups_per_s]
    return min(fast, key=lambda each: (each.setup.max_staleness, -each.groups_per_s))


def print_run_plan(
    config: Config, devices: int, run: str | None, file: str | None, save: str | None, as_json: bool
) -> None:
    """Raises ConfigError as `stage_times` and `job`, and for devices that hold no run."""
    times = stage_times(run, file)
    if save is not None:
        write_times(times, Path(save), f"Stage times of {run or file}, for asyncrl plan --times")
    outcomes = search(job(config, times), devices)
    if not outcomes:
        least = min(times.generator_devices, times.rank_devices)
        rule = "holds neither a generator nor a data rank"
        raise ConfigError("--devices", devices, rule, f"give {least} devices or more")
    best = recommended(outcomes)
    if as_json:
        found = {
            "outcomes": [_as_json(outcome) for outcome in outcomes],
            "verdict": worth(outcomes),
            "keys": dict(keys(best, times, config)),
        }
        print(json.dumps(found, indent=2))
        return
    print("\n".join(_table(outcomes)))
    print(f"\n{worth(outcomes)}")
    if busiest := max(outcome.brokers[0] for outcome in outcomes):
        print(f"the queue is busy {busiest:.1%} of the time at most")
    for pool in POOLS:
        if best.busy(pool) < IDLE:
            print(f"the {pool} would be busy {best.busy(pool):.0%} of the time: try fewer --devices")
    print("keys to set: " + " ".join(f"{name}={value}" for name, value in keys(best, times, config)))


def keys(best: Simulated, times: StageTimes, config: Config) -> Iterator[tuple[str, object]]:
    """The keys of a setup, and their values. Depth and window follow max_staleness."""
    setup = best.setup
    if setup.colocated:
        yield from COLOCATED.items()
    yield "generator.count", setup.generators
    yield "learner.processes", setup.data_ranks * times.rank_devices
    yield "generator.slots", setup.slots
    yield "queue.max_staleness", setup.max_staleness
    for name in ("window", "depth"):
        if getattr(config.queue, name) is not None:
            yield f"queue.{name}", "null"


def _table(outcomes: Sequence[Simulated]) -> Iterator[str]:
    rows = [COLUMNS, *map(_row, outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        first, *others = (
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *others]).rstrip()


def _row(outcome: Simulated) -> tuple[str, ...]:
    oldest = max(outcome.staleness)
    return (
        outcome.setup.mode + (f" {outcome.setup.max_staleness}" if outcome.setup.max_staleness > 1 else ""),
        str(outcome.setup.generators),
        str(outcome.setup.slots),
        str(outcome.setup.data_ranks),
        _number(outcome.groups_per_s),
        _number(outcome.bound),
        _number(outcome.tokens_per_s),
        f"{outcome.busy('generators'):.0%}",
        f"{outcome.busy('learner'):.0%}",
        f"{outcome.mean_staleness:.1f} ≤ {oldest}",
        f"{outcome.pause_share:.1%}",
    )


def _number(value: float) -> str:
    """Three digits.

    >>> [_number(value) for value in (0.01234, 12.34, 123456.0)]
    ['0.0123', '12.3', '123000']
    """
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{round(value, digits):.{max(0, digits)}f}"


def _as_json(outcome: Simulated) -> dict[str, Any]:
    setup, pools = outcome.setup, POOLS
    return {
        "mode": setup.mode,
        "generators": setup.generators,
        "slots": setup.slots,
        "data_ranks": setup.data_ranks,
        "max_staleness": setup.max_staleness,
        "groups_per_s": outcome.groups_per_s,
        "bound_groups_per_s": outcome.bound,
        "tokens_per_s": outcome.tokens_per_s,
        "version_s": outcome.version_s,
        "busy": {pool: outcome.busy(pool) for pool in pools} | {"queue": outcome.brokers[0]},
        "shares": {pool: outcome.shares(pool) for pool in pools},
        "staleness": {str(age): count for age, count in sorted(outcome.staleness.items())},
        "lag_s": outcome.lag_s,
    }


def write_times(times: StageTimes, path: Path, about: str) -> None:
    """A file that `read_times` takes. about: its first line"""
    lines = [f"# {about}"]
    for name, value in _plain(times).items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"  {inner}: {one_line(number)}" for inner, number in value.items())]
        else:
            lines.append(f"{name}: {one_line(value)}")
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def _plain(times: StageTimes) -> dict[str, Any]:
    """Numbers with six digits; more are noise."""

    def shorter(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: shorter(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [shorter(inner) for inner in value]
        return float(f"{value:.6g}") if isinstance(value, float) else value

    found: dict[str, Any] = shorter(dataclasses.asdict(times))
    return found
