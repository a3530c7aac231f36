"""The report of `asyncrl bench utilization`: the ratio that the runs support, a table, and a picture.

One repetition has one run of each mode, so what the machine does meanwhile touches all; the ratio is taken within a
repetition. Its interval is Student's over the logarithms of these ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, log, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncrl.system.packages import imported
from asyncrl.telemetry.spans import OTHER, WAIT

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles of Student's t for two-sided 95 %, with 1, 2, … degrees of freedom; the last one serves for more."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """value: the geometric mean over repetitions · low, high: its 95 % interval, None with one repetition"""

    value: float
    low: float | None
    high: float | None

    @staticmethod
    def of(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
        """The rates of both ways, repetition by repetition.

        >>> Ratio.of([2.0, 8.0], [1.0, 4.0])
        Ratio(value=2.0, low=2.0, high=2.0)
        """
        logs = [log(a / b) for a, b in zip(ours, theirs, strict=True)]
        centre = mean(logs)
        if len(logs) == 1:
            return Ratio(exp(centre), None, None)
        reach = T_95[min(len(logs) - 1, len(T_95)) - 1] * stdev(logs) / sqrt(len(logs))
        return Ratio(exp(centre), exp(centre - reach), exp(centre + reach))


@dataclass(frozen=True, slots=True)
class Length:
    """The shortest run: its versions and seconds without warm-up, and the warm-up's versions."""

    versions: int
    seconds: float
    warm_up: int

    def versions_for(self, seconds: float) -> int:
        """The number of versions that take a run `seconds` at this pace.

        >>> Length(versions=10, seconds=5.0, warm_up=3).versions_for(60.0)
        123
        """
        return self.warm_up + ceil(self.versions * seconds / self.seconds)


def verdict(ratio: Ratio, length: Length, least_s: float) -> str:
    """The result that the measurement supports: a ratio with its interval, or why it supports none."""
    if length.seconds < least_s:
        needed = length.versions_for(least_s)
        return (
            f"no claim: the shortest run was measured for {length.seconds:.1f} s and {least_s:.0f} s are needed "
            f"(--versions {needed})"
        )
    if ratio.low is None or ratio.high is None:
        return f"no claim: {ratio.value:.2f} x in one repetition; an interval needs more (--repetitions 3)"
    interval = f"{ratio.low:.2f} to {ratio.high:.2f}, 95 %"
    if ratio.low <= 1.0 <= ratio.high:
        return f"no claim: {ratio.value:.2f} x, and the interval has 1 in it ({interval}); more repetitions narrow it"
    return f"{ratio.value:.2f} x ({interval})"


def shortest(lengths: Mapping[str, Sequence[Length]]) -> Length:
    """Over all runs of all ways."""
    return min((length for runs in lengths.values() for length in runs), key=lambda length: length.seconds)


WORK_COLOURS = ("#2b8a3e", "#69db7c", "#b2f2bb", "#087f5b")
WAIT_COLOURS = ("#c92a2a", "#ff8787", "#f08c00", "#ffd43b", "#868e96", "#ced4da")


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """A column for each mode, which fits 80 characters, and what may be claimed of `async`."""
    found = report["modes"]
    table = Table("", *found, title="Utilization", title_justify="left")
    for label, text in _ROWS.items():
        table.add_row(label, *(text(mode) for mode in found.values()))
    console.print(table)
    console.print(f"reward reached: {report['figures']['reward_target']:.3f}", highlight=False)
    for name, sentence in report["claims"].items():
        console.print(f"{name.replace('_', ' ', 2)}: {sentence}", highlight=False)


_ROWS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "rollouts/s": lambda mode: f"{mode['rollouts_per_s']:.0f}",
    "of single runs": lambda mode: " ".join(f"{rate:.0f}" for rate in mode["rollouts_per_s_of_runs"]),
    "bound": lambda mode: _number(mode["bound_rollouts_per_s"], "{:.0f}"),
    "seconds a run": lambda mode: " ".join(
        f"{seconds:.{1 if seconds < 10 else 0}f}" for seconds in mode["s_of_runs"]
    ),
    "generator busy": lambda mode: f"{mode['busy']['generator']:.0%}",
    "  waits for": lambda mode: _waits(mode["shares"]["generator"]),
    "learner busy": lambda mode: f"{mode['busy']['learner']:.0%}",
    "  waits for ": lambda mode: _waits(mode["shares"]["learner"]),
    "generator's GPUs": lambda mode: _gpus(mode, "generator"),
    "learner's GPUs": lambda mode: _gpus(mode, "learner"),
    "staleness": lambda mode: f"{mode['staleness_mean']:.1f} ≤ {mode['staleness_max']:.0f}",
    "s to reward": lambda mode: _number(mode["s_to_reward"], "{:.1f}"),
}
"""Label → the cell of a mode."""


def _waits(shares: Mapping[str, float]) -> str:
    """The waits worth a percent, a line each, the longest first."""
    waits = sorted(((s, n) for n, s in shares.items() if n.startswith(WAIT) and s >= 0.01), reverse=True)
    return "\n".join(f"{name.removeprefix(WAIT)} {share:.0%}" for share, name in waits) or "–"


def _gpus(mode: Mapping[str, Any], pool: str) -> str:
    """The busy share that their driver measured, and the power of one."""
    busy, watts = mode["gpu_busy"][pool], mode["gpu_watts"][pool]
    return f"{_number(busy, '{:.0%}')} {_number(watts, '{:.0f} W')}" if busy is not None else "–"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def draw(report: Mapping[str, Any], path: Path) -> None:
    """One bar per mode and pool, stacked by span; the throughput beside it.

    Raises ConfigError without matplotlib.
    """
    imported("matplotlib", "bench", "--plot", str(path)).use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.5, 4.2))
    bars = [(mode, pool) for mode in reversed(report["modes"]) for pool in ("learner", "generator")]
    colours: dict[str, str] = {}
    for y, (mode, pool) in enumerate(bars):
        left = 0.0
        for name, share in sorted(report["modes"][mode]["shares"][pool].items(), key=_work_first):
            label = None if name in colours else name
            colour = colours.setdefault(name, _colour(name, colours))
            axes.barh(y, share, left=left, color=colour, label=label, height=0.8)
            left += share
    labels = [f"{mode}: {pool}" for mode, pool in bars]
    axes.set_yticks(range(len(bars)), labels)
    for y, (mode, pool) in enumerate(bars):
        if pool == "generator":
            axes.text(1.01, y - 0.5, f"{report['modes'][mode]['rollouts_per_s']:.0f} rollouts/s", va="center")
    axes.set(xlim=(0, 1), xlabel="share of the time")
    axes.legend(bbox_to_anchor=(0.5, -0.15), loc="upper center", ncols=4, frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)


def _is_wait(name: str) -> bool:
    return name.startswith(WAIT) or name == OTHER


def _work_first(item: tuple[str, float]) -> tuple[bool, str]:
    return _is_wait(item[0]), item[0]


def _colour(name: str, taken: Mapping[str, str]) -> str:
    palette = WAIT_COLOURS if _is_wait(name) else WORK_COLOURS
    used = sum(_is_wait(other) == _is_wait(name) for other in taken)
    return palette[used % len(palette)]
