"""Seconds of an engine's decode steps, or prefills, by the sequences in them: seconds ≈ step_s + n · sequence_s.

Five sums are enough for the line of least squares, and sums of several engines add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

DECODE, PREFILL = "decode/", "prefill/"
"""Begin the names of the sums in an engine's stats."""

SPREAD = 0.05
"""Standard deviation of n over its mean from which on a slope is fitted."""


class StepTimes(NamedTuple):
    """Sums over steps, n being a step's sequences and s its seconds."""

    steps: float = 0.0
    n: float = 0.0
    nn: float = 0.0
    s: float = 0.0
    ns: float = 0.0

    def with_step(self, sequences: int, seconds: float) -> Self:
        return self + type(self)(1.0, sequences, sequences**2, seconds, sequences * seconds)

    def __add__(self, other: tuple[float, ...]) -> Self:  # type: ignore[override]
        return type(self)(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def stats(self, prefix: str) -> dict[str, float]:
        """As `Engine.stats` has them. prefix: DECODE or PREFILL"""
        return {f"{prefix}{name}": float(value) for name, value in self._asdict().items()}

    @classmethod
    def of_stats(cls, prefix: str, stats: Mapping[str, float]) -> Self:
        """Zeros for an engine that does not time its steps."""
        return cls(*(float(stats.get(f"{prefix}{name}", 0.0)) for name in cls._fields))

    def line(self) -> tuple[float, float] | None:
        """(step_s, sequence_s), neither below 0; None where all steps had about as many sequences.

        >>> times = StepTimes().with_step(10, 0.03).with_step(20, 0.05)
        >>> [round(value, 6) for value in times.line()]
        [0.01, 0.002]
        >>> StepTimes().with_step(8, 0.1).line()
        """
        spread = self.steps * self.nn - self.n**2
        if spread <= (SPREAD * self.n) ** 2:
            return None
        slope = max(0.0, (self.steps * self.ns - self.n * self.s) / spread)
        offset = (self.s - slope * self.n) / self.steps
        return (offset, slope) if offset >= 0 else (0.0, self.s / self.n)

    def line_from(self, step_s: float) -> tuple[float, float]:
        """`line`, or where there is none, the one of this step_s. Zeros without any steps.

        >>> [round(value, 6) for value in StepTimes().with_step(8, 0.1).line_from(0.02)]
        [0.02, 0.01]
        """
        if not self.steps:
            return 0.0, 0.0
        return self.line() or (step_s, max(0.0, (self.s - step_s * self.steps) / self.n))
