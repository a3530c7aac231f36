"""What a bench has to reach: figures of several repetitions, their ratios, and verdicts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Measured = Mapping[str, float]
"""Figures of one repetition by name; what is absent is not there."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure, or its ratio to another one of the same repetition, and what it must reach (or stay below)."""

    figure: str
    bound: float
    over: str | None = None
    most: bool = False

    @property
    def text(self) -> str:
        what = self.figure if self.over is None else f"{self.figure} / {self.over}"
        return f"{what} {'≤' if self.most else '≥'} {self.bound:,g}"

    def passes(self, value: float | None) -> bool:
        return value is not None and (value <= self.bound if self.most else value >= self.bound)


def figures(
    repetitions: Sequence[Measured], bars: Iterable[Bar], beside: Iterable[tuple[str, str]] = ()
) -> dict[str, float]:
    """Medians over the repetitions of every figure and of every ratio 'a / b' that a bar, or `beside`, names.

    >>> figures([{"a": 1.0}, {"a": 5.0}, {"a": 2.0}], [])
    {'a': 2.0}
    """
    names = dict.fromkeys(name for measured in repetitions for name in measured)
    found = {name: _median(repetitions, name) for name in names}
    for over, under in [*((bar.figure, bar.over) for bar in bars if bar.over), *beside]:
        found[f"{over} / {under}"] = _ratio(repetitions, over, under)
    return {name: value for name, value in found.items() if value is not None}


def value_of(bar: Bar, found: Measured) -> float | None:
    """None: not measured."""
    return found.get(bar.figure if bar.over is None else f"{bar.figure} / {bar.over}")


def verdicts(found: Measured, bars: Iterable[Bar]) -> list[tuple[str, str]]:
    """(bar, verdict) of each."""
    lines = []
    for bar in bars:
        value = value_of(bar, found)
        said = (
            "absent: not measured"
            if value is None
            else f"{'pass' if bar.passes(value) else 'FAIL'}: {value:,.4g}"
        )
        lines.append((bar.text, said))
    return lines


def verdict_table(found: Measured, bars: Iterable[Bar]) -> list[str]:
    """Lines of Markdown."""
    return ["| bar | |", "|---|---|", *(row(line) for line in verdicts(found, bars))]


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _median(repetitions: Sequence[Measured], name: str) -> float | None:
    values = [measured[name] for measured in repetitions if name in measured]
    return median(values) if values else None


def _ratio(repetitions: Sequence[Measured], over: str, under: str) -> float | None:
    """Of each repetition, so that what slows the whole machine for a while does not count."""
    ratios = [
        measured[over] / measured[under] for measured in repetitions if {over, under} <= measured.keys()
    ]
    return median(ratios) if ratios else None
