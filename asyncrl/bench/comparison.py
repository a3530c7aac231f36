"""The speed of one way relative to another, from runs of both that alternate. Pure.

One repetition has one run of each way, so what the machine does meanwhile touches both; the ratio is taken within a
repetition. The interval is Student's over the logarithms of these ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, log, sqrt
from statistics import mean, stdev

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
