"""Rows and the summary have no figures of generators that have not reported any."""

from __future__ import annotations

from asyncrl.learner.reporting.report import GeneratorTotals, run_summary, step_row

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
    summary = run_summary(
        [step_row(1, {}, {"work": 1.0}, {}, early)], max_staleness=1, wall_s=1.0, ended="done"
    )
    assert (summary["tokens_generated"], summary["weight_updates"]) == (None, None)
    assert summary["utilization"]["generator"] is None

    later = totals.update({"generator-0": LATER, "generator-1": EARLY})
    assert (later["generators"], later["tokens_generated"], later["weight_updates"]) == (2, 40, 1)
    assert (later["held/min"], later["reward/failures"]) == (2, 3)


def test_the_summary_of_a_resumed_run_is_of_all_its_processes() -> None:
    """The second process counts tokens and weight updates from 0, and its clock too."""

    def row(version: int, time: float, tokens: int, updates: int) -> dict[str, float]:
        counted = {"tokens_generated": tokens, "weight_updates": updates}
        return {"time": time, **step_row(version, {}, {"work": 10.0}, {}, counted)}

    rows = [row(1, 110.0, 40, 1), row(2, 120.0, 100, 2), row(3, 1010.0, 30, 1), row(4, 1020.0, 90, 3)]
    summary = run_summary(rows, max_staleness=1, wall_s=25.0, ended="done", began=996.0)
    assert (summary["train_s"], summary["wall_s"]) == (40.0, 45.0)
    assert (summary["tokens_generated"], summary["weight_updates"]) == (190, 5)
