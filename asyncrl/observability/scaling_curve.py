"""A sigmoid of a run's held-out scores: how far it will get, and how well its first half predicts the second.

    evaluations ──▸ points (x, score) ── first half ──▸ sigmoid ──▸ error on the second half
                                       └─ all ────────▸ sigmoid ──▸ the score at twice as much

Khatri et al., The Art of Scaling Reinforcement Learning Compute for LLMs, arXiv:2510.13786, equation 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from asyncrl.observability.rows import STEP_S, MetricRows, number, series

Floats = NDArray[np.float64]

LEAST_POINTS = 8
"""Evaluations below which there is no fit."""

STEEPEST, FLATTEST = 10.0, 0.2
"""Bounds of the exponent."""

BEYOND = 10.0
"""The midpoint may lie so many times below the first x, or above the last."""

GRID, ZOOMS, ZOOM = 41, 6, 8
"""Points of the search along the midpoint and the exponent; how often it looks, each time so many times closer."""

TINY = 1e-300

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Sigmoid:
    """score(x) = start + (asymptote - start) / (1 + (midpoint / x) ** exponent)

    Attributes:
        start: The score at x = 0, which is not fitted.
        asymptote: The score that it approaches: A of the paper.
        midpoint: The x at which half of the gain is reached: C_mid.
        exponent: How steep the gain is: B.
    """

    start: float
    asymptote: float
    midpoint: float
    exponent: float

    def at(self, x: float) -> float:
        return self.start + (self.asymptote - self.start) * float(
            _share(np.array(x), self.midpoint, self.exponent)
        )

    def error(self, points: Iterable[Point]) -> float:
        """Root mean square."""
        return root_mean_square(self.at(x) - score for x, score in points)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Two fits of a run.

    Attributes:
        points: (x, score), in order of x.
        half: How many of them are the first half.
        early: Fit of the first half.
        whole: Fit of all.
        early_error: Root mean square of the early fit on the second half.
        carried_error: The same of the first half's last score, carried on: a fit that is no better says nothing.
    """

    points: Sequence[Point]
    half: int
    early: Sigmoid
    whole: Sigmoid
    early_error: float
    carried_error: float


def forecast(points: Sequence[Point], most: float = math.inf) -> Forecast:
    """most: the highest score there can be. ValueError for fewer than LEAST_POINTS points."""
    if len(points) < LEAST_POINTS:
        raise ValueError(f"{len(points)} evaluations are too few for a fit; {LEAST_POINTS} are needed")
    half = (len(points) + 1) // 2
    first, second = points[:half], points[half:]
    early = fit(first, most)
    carried = root_mean_square(first[-1][1] - score for _, score in second)
    return Forecast(points, half, early, fit(points, most), early.error(second), carried)


def fit(points: Sequence[Point], most: float = math.inf) -> Sigmoid:
    """The sigmoid with the least squares. It starts at the first point's score, where x is 0 or nearest to it.

    most: of the asymptote

    >>> curve = Sigmoid(start=0.1, asymptote=0.9, midpoint=50.0, exponent=2.0)
    >>> found = fit([(x, curve.at(x)) for x in range(0, 100, 10)])
    >>> round(found.asymptote, 3), round(found.midpoint, 1), round(found.exponent, 2)
    (0.9, 50.0, 2.0)
    """
    start = points[0][1]
    x, gains = np.array([(x, score - start) for x, score in points if x > 0.0]).T
    limits = np.log([[x.min() / BEYOND, x.max() * BEYOND], [FLATTEST, STEEPEST]])
    axes = [np.linspace(low, high, GRID) for low, high in limits]
    for _ in range(ZOOMS):
        gain, *best = _best(x, gains, most - start, *axes)
        axes = [
            np.clip(at + (axis - axis.mean()) / ZOOM, low, high)
            for at, axis, (low, high) in zip(best, axes, limits, strict=True)
        ]
    midpoint, exponent = map(math.exp, best)
    return Sigmoid(start, start + gain, midpoint, exponent)


def _best(
    x: Floats, gains: Floats, most: float, log_midpoints: Floats, log_exponents: Floats
) -> tuple[float, float, float]:
    """Gain, and logarithms of midpoint and exponent: the best of a grid. Gains are the least squares of each place."""
    midpoints, exponents = np.exp(log_midpoints)[:, None, None], np.exp(log_exponents)[None, :, None]
    shares = _share(x, midpoints, exponents)
    gain = np.minimum((shares * gains).sum(-1) / np.maximum((shares**2).sum(-1), TINY), most)
    squares = ((gain[..., None] * shares - gains) ** 2).sum(-1)
    row, column = np.unravel_index(int(squares.argmin()), squares.shape)
    return float(gain[row, column]), float(log_midpoints[row]), float(log_exponents[column])


def _share(x: Floats, midpoint: float | Floats, exponent: float | Floats) -> Floats:
    """The share of the gain that is reached at x."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.asarray(1.0 / (1.0 + (midpoint / x) ** exponent))


def root_mean_square(errors: Iterable[float]) -> float:
    return math.sqrt(float(np.mean([error**2 for error in errors])))


def points_of(rows: MetricRows, metric: str, hours: bool) -> list[Point]:
    """Evaluations of a run by version, or by the hours that its learner's steps took until then."""
    scores = series(rows.evaluations, metric)
    if not hours:
        return [(float(version), score) for version, score in scores]
    took = [(row["version"], number(row, STEP_S) or 0.0) for row in rows.versions]
    until = dict(zip((version for version, _ in took), accumulate(s / 3600.0 for _, s in took), strict=True))
    known = [
        (until.get(version, 0.0), score) for version, score in scores if version == 0 or version in until
    ]
    return known if any(x > 0.0 for x, _ in known) else []
