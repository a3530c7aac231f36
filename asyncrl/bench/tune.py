"""`asyncrl tune CONFIG`: the keys that decide how fast a run is, by a short real run, simulations, and real runs again.

CONFIG ──▸ a short run ──▸ its stage times ──▸ simulations, key by key ──▸ CONFIG with other keys
                                                                             │
          which of the two is faster in fact? ◂── short runs of both, in turns, repeated
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from asyncrl.bench.report import Ratio
from asyncrl.bench.utilization import short_run
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.run_plan import job, setup_of
from asyncrl.twin.calibrate import FIRST, LEAST, calibrate, check_one_kind
from asyncrl.twin.outcome import Simulated
from asyncrl.twin.plan import PlannedRun
from asyncrl.twin.tune import KEYS, LEAST_GAIN, Change, tune

GIVEN, TUNED = "given", "tuned"

SPLIT = ("generators", "data_ranks")
"""Fields of KEYS that are tried only where devices are given."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """keys: those to set · changes: how the simulations came to them · best: their outcome · measured: throughput of
    real runs with them over that of the given ones; None where nothing is to be set, or nothing was measured · split:
    whether devices were given, which may be split otherwise"""

    keys: Mapping[str, Any]
    changes: Sequence[Change]
    best: Simulated
    measured: Ratio | None
    split: bool = False

    @property
    def slower(self) -> bool:
        """Whether the real runs were slower with these keys."""
        ratio = self.measured
        return ratio is not None and (ratio.value if ratio.high is None else ratio.high) < 1


def run_tuning(
    path: str, overrides: Sequence[str], folder: Path, versions: int, repetitions: int, devices: int | None
) -> Tuning:
    """Raises ConfigError for fewer versions than a calibration needs, for generators of several kinds, and as the runs
    do."""
    if versions < FIRST + LEAST:
        rule = "is too few for a calibration"
        raise ConfigError("--versions", versions, rule, f"give {FIRST + LEAST} or more")
    config = load_config(path, overrides)
    check_one_kind(config)
    runs = _Runs(path, overrides, folder, versions)
    runs.rate(GIVEN, {})
    found = job(config, calibrate(folder / GIVEN))
    best, changes = tune(found, devices)
    keys = dict(_keys(config, found, best))
    if not keys:
        return Tuning(keys, changes, best, None, split=devices is not None)
    rates: dict[str, list[float]] = {GIVEN: [], TUNED: []}
    for repetition in range(repetitions):
        ways = [(GIVEN, {}), (TUNED, keys)]
        for name, chosen in reversed(ways) if repetition % 2 else ways:
            rates[name].append(runs.rate(name, chosen))
    measured = Ratio.of(rates[TUNED], rates[GIVEN]) if repetitions else None
    return Tuning(keys, changes, best, measured, split=devices is not None)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Short runs of one configuration."""

    path: str
    overrides: Sequence[str]
    folder: Path
    versions: int

    def rate(self, name: str, keys: Mapping[str, Any]) -> float:
        """Rollouts a second of a run with these keys, without its first versions."""
        print(f"asyncrl tune: a run of {self.versions} versions, {name}", flush=True)
        words = ["launch.quiet=true", *(f"{key}={_word(value)}" for key, value in keys.items())]
        rows = short_run(self.path, self.overrides, self.folder / name, self.versions, words)[FIRST:]
        return float(sum(row["train/rollouts"] for row in rows) / sum(row["perf/step_s"] for row in rows))


def _keys(config: Config, job: PlannedRun, best: Simulated) -> Iterator[tuple[str, Any]]:
    """The keys whose values differ from those of the configuration."""
    given = setup_of(config)
    for field, key in KEYS.items():
        was, now = getattr(given, field), getattr(best.setup, field)
        if field == "data_ranks" and was != now:
            yield key, now * job.times.rank_devices
        elif was != now:
            yield key, now


def print_tuning(tuning: Tuning, write: Path | None, path: str) -> None:
    """Print the keys to set, and why. `write` gets a configuration that includes the given one."""
    for change in tuning.changes:
        names = " ".join(f"{KEYS[field]}={_word(value)}" for field, value in change.fields.items())
        print(f"{names}: {change.gain:.2f} × ({change.reason()})")
    if tuning.best.setup.max_staleness == 0:
        print("asynchrony will not help you: the synchronous run is as fast, with the newest data")
    if not tuning.keys:
        tried = [key for field, key in KEYS.items() if tuning.split or field not in SPLIT]
        print(
            f"nothing to set: no value of {', '.join(tried)} gains {LEAST_GAIN - 1:.0%} in the simulation. "
            "More devices for the pool that does not wait would (asyncrl plan)"
        )
        return
    print(_measured(tuning))
    if tuning.slower:
        print("nothing to set: keep the given keys")
        return
    print("keys to set: " + " ".join(f"{key}={_word(value)}" for key, value in tuning.keys.items()))
    if write is not None:
        tree: dict[str, Any] = {"include": [str(Path(path).absolute())]}
        for key, value in tuning.keys.items():
            section, name = key.split(".")
            tree.setdefault(section, {})[name] = value
        write.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
        print(f"written to {write}")


def _measured(tuning: Tuning) -> str:
    ratio = tuning.measured
    if ratio is None:
        return "not measured"
    text = f"measured: {ratio.value:.2f} × the throughput of the given keys"
    if ratio.low is None or ratio.high is None:
        return f"{text} in one repetition: give --repetitions 3 for an interval"
    text += f" ({ratio.low:.2f} to {ratio.high:.2f}, 95 %)"
    if ratio.low > 1:
        return text
    if tuning.slower:
        return f"{text}: slower, although the simulation has it faster"
    return f"{text}: not certain to be faster; give more --versions or --repetitions, or keep the given keys"


def _word(value: Any) -> str:
    return "null" if value is None else str(value)
