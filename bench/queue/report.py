"""Figures from the repetitions, the bars that they have to clear, and a table of both. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Measured = Mapping[str, float]
"""Figures of one repetition by name, e.g. 'rows_per_s.asyncrl_memory.512'; what is absent is not there."""

SHORT, LONG = 512, 8192


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


def _rate(system: str, tokens: int) -> str:
    return f"rows_per_s.{system}.{tokens}"


BARS = (
    Bar(_rate("asyncrl_memory", SHORT), 10, over=_rate("transferqueue", SHORT)),
    Bar(_rate("asyncrl_memory", LONG), 6, over=_rate("transferqueue", LONG)),
    *(Bar(_rate("asyncrl_memory", n), 0.6, over=_rate("pyzmq_bare", n)) for n in (SHORT, LONG)),
    *(Bar(_rate("asyncrl_journal", n), 0.75, over=_rate("asyncrl_memory", n)) for n in (SHORT, LONG)),
    *(Bar(_rate("asyncrl_redis", n), 0.5, over=_rate("asyncrl_memory", n)) for n in (SHORT, LONG)),
    *(Bar(f"hop_ms_p99.{system}", 3, most=True) for system in ("asyncrl_memory", "asyncrl_journal")),
    Bar("ledger_transitions_per_s", 100_000),
)

BESIDE = (
    *((_rate("asyncrl_curve", n), _rate("asyncrl_memory", n)) for n in (SHORT, LONG)),
    *((f"mb_per_s.asyncrl_journal_payload.{n}", "disk_mb_per_s") for n in (SHORT, LONG)),
    *((f"mb_per_s.{system}.{LONG}", "memcpy_mb_per_s") for system in ("asyncrl_memory", "pyzmq_bare")),
)
"""Ratios that are reported and have no bar."""


def figures(repetitions: Sequence[Measured]) -> dict[str, float]:
    """Medians over the repetitions of every figure and of every ratio, 'a / b'.

    >>> figures([{"a": 1.0}, {"a": 5.0}, {"a": 2.0}])
    {'a': 2.0}
    """
    names = dict.fromkeys(name for measured in repetitions for name in measured)
    found = {name: _median(repetitions, name) for name in names}
    for over, under in [*((bar.figure, bar.over) for bar in BARS if bar.over), *BESIDE]:
        found[f"{over} / {under}"] = _ratio(repetitions, over, under)
    return {name: value for name, value in found.items() if value is not None}


def value_of(bar: Bar, found: Measured) -> float | None:
    """None: not measured."""
    return found.get(bar.figure if bar.over is None else f"{bar.figure} / {bar.over}")


def verdicts(found: Measured) -> list[str]:
    lines = []
    for bar in BARS:
        value = value_of(bar, found)
        if value is None:
            lines.append(f"absent  {bar.text}: not measured")
        else:
            lines.append(f"{'pass' if bar.passes(value) else 'FAIL'}  {bar.text}: {value:,.4g}")
    return lines


def table(
    systems: Mapping[str, str], found: Measured, absent: Mapping[str, str], machine: str, repetitions: int
) -> str:
    """Markdown. systems: name -> what it is."""
    head = ("system", "what", "rows/s at 512", "MB/s", "rows/s at 8192", "MB/s", "hop p50 ms", "p99 ms")
    lines = [_row(head), _row("---" if i < 2 else "--:" for i in range(len(head)))]
    for name, what in systems.items():
        if name in absent:
            lines.append(_row([name, f"{what}: absent, {absent[name]}", *[""] * 6]))
            continue
        keys = [
            f"{figure}.{name}.{tokens}" for tokens in (SHORT, LONG) for figure in ("rows_per_s", "mb_per_s")
        ]
        shown = [_number(found.get(key), ",.0f") for key in keys]
        shown += [_number(found.get(f"{key}.{name}"), ".2f") for key in ("hop_ms_p50", "hop_ms_p99")]
        lines.append(_row([name, what, *shown]))
    limits = ("memcpy_mb_per_s", "disk_mb_per_s", "ledger_transitions_per_s")
    beside = [f"{over} / {under}" for over, under in BESIDE]
    return "\n".join(
        [
            "# The transfer queue beside others",
            "",
            f"`python -m bench.queue`, medians of {repetitions} interleaved repetitions. {machine}",
            "Groups of 8 rows; 17 bytes a token (int64 ids, float32 log-probs, int8 mask, int32 versions). Producer, "
            "broker and consumer are processes of their own.",
            "A hop is from the producer's call to the arrays in the consumer, one group of 512-token rows at a time.",
            "",
            *lines,
            "",
            *(f"- {name}: {_number(found.get(name), ',.3g')}" for name in (*limits, *beside)),
            "",
            "| bar | |",
            "|---|---|",
            *(_row([text, verdict]) for verdict, text in (line.split("  ", 1) for line in verdicts(found))),
            "",
        ]
    )


def _median(repetitions: Sequence[Measured], name: str) -> float | None:
    values = [measured[name] for measured in repetitions if name in measured]
    return median(values) if values else None


def _ratio(repetitions: Sequence[Measured], over: str, under: str) -> float | None:
    """Of each repetition, so that what slows the whole machine for a while does not count."""
    ratios = [
        measured[over] / measured[under] for measured in repetitions if {over, under} <= measured.keys()
    ]
    return median(ratios) if ratios else None


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
