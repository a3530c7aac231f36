"""The bench of predictions, without its runs."""

from __future__ import annotations

import argparse

import pytest

from asyncrl.config.load import load_config
from asyncrl.twin.times import StageTimes
from bench.twin import RUNS, error, over_time, overrides, predicted, table

ARGS = argparse.Namespace(config="configs/recipes/demo.yaml", model="m", dir="runs", versions=8)


@pytest.mark.parametrize("name", RUNS)
def test_each_run_is_a_configuration_and_is_predicted(name: str) -> None:
    load_config(ARGS.config, overrides(ARGS, name))
    found = predicted(ARGS, name, StageTimes())
    assert found["rollouts_per_s"] > 0
    assert 0 <= found["busy.learner"] <= 1


def test_the_table_has_both_sides_of_each_run() -> None:
    side = {"rollouts_per_s": 110.0, "busy.generator": 0.9, "busy.learner": 0.5, "staleness": 1.0}
    repetitions = [
        {"calibration": {"predicted": side, "measured": {**side, "rollouts_per_s": rate}}}
        for rate in (100.0, 110.0, 88.0)
    ]
    assert error(repetitions[0]["calibration"]) == pytest.approx(0.1)
    line = "| calibration | 110 | 100 | +10% | +0% | +25% | 90% | 90% | 50% | 50% | 1.00 | 1.00 |"
    assert line in table(repetitions, 8)


def test_a_share_is_the_mean_over_the_time_of_the_rows_that_have_it() -> None:
    rows = [{"perf/step_s": 1.0, "busy": 0.4}, {"perf/step_s": 5.0}, {"perf/step_s": 3.0, "busy": 0.8}]
    assert over_time(rows, "busy") == pytest.approx(0.7)
