"""Rows and the summary have no figures of generators that have not reported any."""

from __future__ import annotations

from asyncrl.learner.reporting.report import GeneratorTotals, step_row, summarise

EARLY = {"tokens": 0, "held": -1, "weights/flips": 0, "seconds": {"wait": 2.0}, "reward/failures": 0}
LATER = {
    "tokens": 40,
    "held": 2,
    "weights/flips": 1,
    "seconds": {"wait": 2.0, "decode": 2.0},
    "reward/failures": 3,
}


def test_a_generator_without_weights_is_counted_and_nothing_else_is_known() -> None:
    totals = GeneratorTotals()
    early = totals.update({"generator-0": EARLY})
    assert early == {"generators": 1}
    summary = summarise(
        [step_row(1, {}, {"work": 1.0}, {}, early)], max_staleness=1, wall_s=1.0, ended="done"
    )
    assert (summary["tokens_generated"], summary["weight_updates"]) == (None, None)
    assert summary["utilization"]["generator"] is None

    later = totals.update({"generator-0": LATER, "generator-1": EARLY})
    assert (later["generators"], later["tokens_generated"], later["weight_updates"]) == (2, 40, 1)
    assert (later["held/min"], later["reward/failures"]) == (2, 3)
