"""Figures from the repetitions, the bars that they have to clear, and a table of both. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from bench.bars import Bar, Measured, number, row, verdict_table

SHORT, LONG = 512, 8192


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


def table(
    systems: Mapping[str, str], found: Measured, absent: Mapping[str, str], machine: str, repetitions: int
) -> str:
    """Markdown. systems: name -> what it is."""
    head = ("system", "what", "rows/s at 512", "MB/s", "rows/s at 8192", "MB/s", "hop p50 ms", "p99 ms")
    lines = [row(head), row("---" if i < 2 else "--:" for i in range(len(head)))]
    for name, what in systems.items():
        if name in absent:
            lines.append(row([name, f"{what}: absent, {absent[name]}", *[""] * 6]))
            continue
        keys = [
            f"{figure}.{name}.{tokens}" for tokens in (SHORT, LONG) for figure in ("rows_per_s", "mb_per_s")
        ]
        shown = [number(found.get(key), ",.0f") for key in keys]
        shown += [number(found.get(f"{key}.{name}"), ".2f") for key in ("hop_ms_p50", "hop_ms_p99")]
        lines.append(row([name, what, *shown]))
    limits = ("memcpy_mb_per_s", "disk_mb_per_s", "ledger_transitions_per_s")
    beside = [f"{over} / {under}" for over, under in BESIDE]
    return "\n".join(
        [
            "# The transfer queue beside others",
            "",
            f"`python -m bench.queue`, medians of {repetitions} interleaved repetitions. {machine}",
            "Groups of 8 rows; 17 bytes a token (int64 ids, float32 log-probs, int8 mask, int32 versions), which MB/s "
            "counts; asyncrl sends 8 of them (payload.py). Producer, broker and consumer are processes of their own.",
            "A hop is from the producer's call to the arrays in the consumer, one group of 512-token rows at a time.",
            "",
            *lines,
            "",
            *(f"- {name}: {number(found.get(name), ',.3g')}" for name in (*limits, *beside)),
            "",
            *verdict_table(found, BARS),
            "",
        ]
    )
