"""Rows and the summary have no figures of generators that have not reported any."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from learner_cases import small_config, tiny_model

from asyncrl.config.schema import LaunchConfig, LearnerConfig
from asyncrl.device.meter import GpuTotals
from asyncrl.learner.reporting.report import SUMMARY, GeneratorTotals, RunRecords, run_summary, step_row
from asyncrl.telemetry.step_times import DECODE, PREFILL, StepTimes

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
    assert early == {"rollout/generators": 1}
    summary = run_summary(
        [step_row(1, {}, {"work": 1.0}, {}, early)], max_staleness=1, wall_s=1.0, ended="done"
    )
    assert (summary["tokens_generated"], summary["weight_updates"]) == (None, None)
    assert summary["utilization"]["generator"] is None

    later = totals.update({"generator-0": LATER, "generator-1": EARLY})
    assert (later["rollout/generators"], later["rollout/tokens_generated"], later["sync/flips"]) == (2, 40, 1)
    assert (later["queue/held_min"], later["rollout/reward/failures"]) == (2, 3)


def test_the_gpus_of_all_generators_count_alike() -> None:
    """Two of the first, one of the second; the third has none, and a restarted one counts from 0."""

    def row(*totals: tuple[float, float, float]) -> dict[str, float]:
        stats = {
            f"generator-{n}": LATER | {"gpus": asdict(GpuTotals(*each))} for n, each in enumerate(totals)
        }
        made = seen.update({**stats, "generator-9": LATER})
        return {key: value for key, value in made.items() if "gpu" in key}

    seen = GeneratorTotals()
    assert row((0.0, 0.0, 0.0)) == {}
    assert row((8.0, 6.0, 2400.0), (2.0, 2.0, 400.0)) == {
        "perf/generator/gpu_busy": 0.8,
        "perf/generator/gpu_watts": 280.0,
    }
    assert row((12.0, 6.0, 2800.0), (2.0, 2.0, 400.0)) == {
        "perf/generator/gpu_busy": 0.0,
        "perf/generator/gpu_watts": 100.0,
    }


def test_a_line_goes_through_the_decode_steps_of_all_generators() -> None:
    """One has made steps of 10 sequences, the other one of 20; each alone tells no line."""
    few, many = StepTimes().with_step(10, 0.03), StepTimes().with_step(20, 0.05)
    totals = GeneratorTotals()
    assert "perf/generator/decode/step_s" not in totals.update(
        {"generator-0": {**LATER, **few.stats(DECODE)}}
    )
    row = totals.update(
        {
            "generator-0": {**LATER, **few.stats(DECODE)},
            "generator-1": {**LATER, **many.stats(DECODE)},
            "generator-2": LATER,
        }
    )
    assert row["perf/generator/decode/step_s"] == pytest.approx(0.01)
    assert row["perf/generator/decode/sequence_s"] == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("prefills", "step_s", "sequence_s", "seconds"),
    [
        ([], 0.0, 0.0, 0.0),
        ([(4, 0.02), (8, 0.03)], 0.01, 0.0025, 0.05),
        ([(4, 0.02)], 0.01, 0.0025, 0.02),  # from the 10 ms of a decode step on
    ],
    ids=["none", "of several sizes", "of one size"],
)
def test_prefills_have_a_line_and_seconds(
    prefills: list[tuple[int, float]], step_s: float, sequence_s: float, seconds: float
) -> None:
    decode = StepTimes().with_step(10, 0.03).with_step(20, 0.05)
    prefill = sum((StepTimes().with_step(*each) for each in prefills), StepTimes())
    row = GeneratorTotals().update(
        {"generator-0": {**LATER, **decode.stats(DECODE), **prefill.stats(PREFILL)}}
    )
    found = [row[f"perf/generator/prefill/{name}"] for name in ("step_s", "sequence_s", "seconds")]
    assert found == pytest.approx([step_s, sequence_s, seconds])
    assert row["perf/generator/decode/seconds"] == pytest.approx(0.08)


def test_the_summary_of_a_resumed_run_is_of_all_its_processes() -> None:
    """The second process counts tokens and weight updates from 0, and its clock too."""

    def row(version: int, time: float, tokens: int, updates: int) -> dict[str, float]:
        counted = {"rollout/tokens_generated": tokens, "sync/flips": updates}
        return {"time": time, **step_row(version, {}, {"work": 10.0}, {}, counted)}

    rows = [row(1, 110.0, 40, 1), row(2, 120.0, 100, 2), row(3, 1010.0, 30, 1), row(4, 1020.0, 90, 3)]
    summary = run_summary(rows, max_staleness=1, wall_s=25.0, ended="done", began=996.0)
    assert (summary["train_s"], summary["wall_s"]) == (40.0, 45.0)
    assert (summary["tokens_generated"], summary["weight_updates"]) == (190, 5)


def test_figures_of_generators_are_since_the_last_version_also_of_one_that_was_restarted() -> None:
    totals = GeneratorTotals()
    first = {
        "generator-0": {
            "tokens": 100,
            "held": 2,
            "weights/flips": 3,
            "seconds": {"compute": 6.0, "wait/tasks": 2.0},
        },
        "generator-1": {
            "tokens": 50,
            "held": 5,
            "weights/flips": 1,
            "seconds": {"compute": 4.0, "wait/tasks": 4.0},
        },
    }
    row = totals.update({name: {**now, "weights/pauses_ms": [1.0, 2.0, 9.0]} for name, now in first.items()})
    assert row == {
        "rollout/generators": 2,
        "rollout/tokens_generated": 150,
        "sync/flips": 4,
        "sync/pause_ms_p50": 2.0,
        "queue/held_min": 2,
        "perf/busy/generator": 10 / 16,
        "perf/generator/tokens_per_s": 2 * 150 / 16,
        "perf/generator/time/compute": 5.0,
        "perf/generator/time/wait/tasks": 3.0,
    }
    row = totals.update(
        {
            "generator-0": {"tokens": 10, "weights/flips": 1, "seconds": {"compute": 1.0, "wait/tasks": 1.0}},
            "generator-1": {"tokens": 80, "weights/flips": 2, "seconds": {"compute": 6.0, "wait/tasks": 4.0}},
        }
    )
    assert (row["rollout/tokens_generated"], row["sync/flips"]) == (190, 6)
    assert (row["perf/busy/generator"], row["perf/generator/tokens_per_s"]) == (0.75, 2 * 40 / 4)


def test_counts_of_pools_are_sums_over_their_processes() -> None:
    pool = {"stage": "rewards", "groups": 3, "busy_s": 2.0}
    row = GeneratorTotals().update({"pool-0": pool, "pool-1": {**pool, "groups": 4}})
    assert row == {
        "rollout/generators": 0,
        "rollout/pool/rewards/groups": 7,
        "rollout/pool/rewards/busy_s": 4.0,
    }


def test_the_summary_has_the_edges_of_a_run_and_weighs_staleness_by_groups() -> None:
    def row(version: int) -> dict[str, float]:
        of_last = {"train/groups": 1, "train/staleness/mean": 9.0, "train/staleness/max": 12}
        of_others = {"train/groups": 3, "train/staleness/mean": 1.0, "train/staleness/max": 2}
        values = {"rollout/reward/mean": version / 10, **(of_last if version == 11 else of_others)}
        pauses = {"sync/pause_ms_p50": 100.0 if version == 11 else 2.0, "sync/publish_ms": 3.0}
        return step_row(version, {**values, **pauses}, {"work": 1.0}, {}, {})

    scores = [{"version": at, "eval/accuracy": score} for at, score in ((0, 0.25), (11, 0.5))]
    rows = [*map(row, range(1, 12)), *scores]
    summary = run_summary(rows, max_staleness=12, wall_s=11.0, ended="done")
    assert (summary["heldout_accuracy_start"], summary["heldout_accuracy_end"]) == (0.25, 0.5)
    assert summary["reward_start"] == pytest.approx(0.3)  # versions 1 to 5
    assert summary["reward_end"] == pytest.approx(0.9)  # versions 7 to 11
    assert summary["staleness"] == {"mean": (10 * 3 * 1.0 + 1 * 9.0) / 31, "max": 12, "bound": 12}
    assert (summary["pause_ms_p50"], summary["publish_ms_p50"]) == (2.0, 3.0)


def test_a_run_that_goes_on_has_no_summary_of_its_end(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    (tmp_path / SUMMARY).write_text("{}")
    records = RunRecords(tmp_path, small_config(tmp_path, learner=LearnerConfig(peak_tflops=1.0)))
    records.open(0)
    records.close()
    assert not (tmp_path / SUMMARY).exists()


def test_trackers_have_most_of_the_time_that_a_clean_end_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    trackers = SimpleNamespace(write=lambda row: None, close=waits.append)
    monkeypatch.setattr("asyncrl.learner.reporting.report.open_trackers", lambda *_: trackers)
    tiny_model(tmp_path / "model")
    records = RunRecords(tmp_path, small_config(tmp_path, launch=LaunchConfig(stop_deadline_s=90)))
    records.open(0)
    records.close()
    assert waits == [60]
