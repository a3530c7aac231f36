"""The bench of staleness: data have the age that was asked for, and each arm is a configuration."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.bench.climb import toy_config
from asyncrl.config.load import load_config
from bench.staleness import ARMS, PLOTTED, draw, figures, table, train

RUNS = [
    {"arm": "clip", "age": 8, "seconds": 10.0, "curve": [(0, 0.3), (20, 0.97)]},
    {"arm": "clip", "age": 8, "seconds": 80.0, "curve": [(0, 0.3), (400, 0.9)]},
    {"arm": "clip", "age": 8, "seconds": 90.0, "curve": [(0, 0.3), (400, 0.8)]},
]


@pytest.mark.parametrize(("age", "mean"), [(0, 0), (1, 4 / 5), (3, (0 + 1 + 2 + 3 + 3) / 5)])
def test_all_data_have_the_age(age: int, mean: float, tmp_path: Path) -> None:
    """By the versions that tokens are labelled with, and by their log-probs: fresh ones are the policy's own."""
    echo = ["evaluation.source=asyncrl.tasks.echo:rows", "evaluation.every=2", "run.versions=5"]
    result = asyncio.run(train(toy_config("off_policy_baseline", tmp_path, echo), age, bar=2.0))
    assert result["staleness"] == pytest.approx(mean)
    assert (result["effective_sample_size"] > 0.9999) == (age == 0)
    assert [version for version, _ in result["curve"]] == [0, 2, 4, 5]


def test_a_run_that_begins_at_the_bar_ends_there(tmp_path: Path) -> None:
    echo = ["evaluation.source=asyncrl.tasks.echo:rows", "run.versions=5"]
    result = asyncio.run(train(toy_config("off_policy_baseline", tmp_path, echo), 8, bar=0.0))
    assert len(result["curve"]) == 1
    assert result["staleness"] == 0


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_is_a_configuration_with_the_learning_rate_of_the_demo(arm: str) -> None:
    demo = load_config("configs/recipes/demo.yaml", [])
    assert load_config("configs/recipes/demo.yaml", ARMS[arm]).learner == demo.learner


def test_a_run_below_the_bar_has_no_version() -> None:
    assert figures(RUNS, 0.96) == {
        "versions_to_bar.clip.8": [20, None, None],
        "accuracy_end.clip.8": 0.9,
    }
    assert "| 8 | `clip` | 20, never, never | 0.900 | 0.595 | 80 |" in table(RUNS, 0.96)


def test_the_plot_has_arms_that_there_are(tmp_path: Path) -> None:
    assert {arm for arm, _ in PLOTTED} <= ARMS.keys()
    draw(RUNS, tmp_path / "figures" / "plot.svg")
    assert "8 versions old: clip" in (tmp_path / "figures" / "plot.svg").read_text("utf-8")
