"""The bench of staleness: data have the age that was asked for, and each arm is a configuration."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from asyncrl.bench.climb import toy_config
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from bench.staleness import ARMS, PLOTTED, STEP_ARMS, draw, figures, lengths, table, train

RUNS = [
    {"arm": "clip", "age": 8, "seconds": 10.0, "curve": [(0, 0.3), (20, 0.97)]},
    {"arm": "clip", "age": 8, "seconds": 80.0, "curve": [(0, 0.3), (400, 0.9)]},
    {"arm": "clip", "age": 8, "seconds": 90.0, "curve": [(0, 0.3), (400, 0.8)]},
]


@pytest.mark.parametrize(("age", "mean"), [(0, 0), (1, 4 / 5), (3, (0 + 1 + 2 + 3 + 3) / 5)])
def test_all_data_have_the_age(age: int, mean: float, tmp_path: Path) -> None:
    """By the versions that tokens are labelled with, and by their log-probs: fresh ones are the policy's own."""
    echo = ["evaluation.source=asyncrl.tasks.echo:rows", "evaluation.every=2", "run.versions=5"]
    result = asyncio.run(train(toy_config("off_policy_baseline", tmp_path, echo), (age,), bar=2.0))
    assert result["staleness"] == pytest.approx(mean)
    assert (result["effective_sample_size"] > 0.9999) == (age == 0)
    assert [version for version, _ in result["curve"]] == [0, 2, 4, 5]
    # Answers of the echo task have three tokens at most.
    assert 1 <= result["lengths"]["median"] <= result["lengths"]["max"] == 3


def test_as_many_groups_have_each_of_several_ages(tmp_path: Path) -> None:
    echo = ["evaluation.source=asyncrl.tasks.echo:rows", "run.versions=5"]
    result = asyncio.run(train(toy_config("off_policy_baseline", tmp_path, echo), (0, 3), bar=2.0))
    assert result["staleness"] == pytest.approx((0 + 1 + 2 + 3 + 3) / 5 / 2)


def test_groups_that_cannot_have_as_many_of_each_age_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no 3 equal parts"):
        asyncio.run(train(toy_config("off_policy_baseline", tmp_path, []), (0, 1, 2), bar=2.0))


def test_other_sets_are_looked_at_once_at_the_end(tmp_path: Path) -> None:
    echo = ["evaluation.source=asyncrl.tasks.echo:rows", "run.versions=2"]
    again = "evaluation.sets.again.source=asyncrl.tasks.echo:rows"
    result = asyncio.run(train(toy_config("off_policy_baseline", tmp_path, [*echo, again]), (0,), bar=2.0))
    assert result["sets"] == {"again": result["curve"][-1][1]}


def test_lengths_of_rollouts() -> None:
    assert lengths([1] * 20 + [80]) == {"median": 1.0, "p95": 1.0, "max": 80.0, "in_longest_20th": 0.8}
    assert lengths([60, 20, 20, 20, 20] * 8)["in_longest_20th"] == 120 / 1120
    assert lengths([]) == {}


def test_a_run_that_begins_at_the_bar_ends_there(tmp_path: Path) -> None:
    echo = ["evaluation.source=asyncrl.tasks.echo:rows", "run.versions=5"]
    result = asyncio.run(train(toy_config("off_policy_baseline", tmp_path, echo), (8,), bar=0.0))
    assert len(result["curve"]) == 1
    assert result["staleness"] == 0


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_is_a_configuration_with_the_learning_rate_of_the_demo(arm: str) -> None:
    demo = load_config("configs/recipes/demo.yaml", [])
    assert load_config("configs/recipes/demo.yaml", ARMS[arm]).learner == demo.learner


@pytest.mark.parametrize("arm", STEP_ARMS)
def test_each_arm_of_steps_is_a_configuration_of_sokoban(arm: str) -> None:
    recipe = load_config("configs/recipes/sokoban.yaml", [])
    changed = load_config("configs/recipes/sokoban.yaml", STEP_ARMS[arm])
    assert changed.learner == recipe.learner
    ours = dataclasses.asdict(changed.algorithm)
    differing = {key for key, value in dataclasses.asdict(recipe.algorithm).items() if ours[key] != value}
    assert (
        differing
        == {
            "off_policy_step_baseline": set(),
            "off_policy_step_baseline_clip": {"loss", "proximal"},
            "off_policy_step_baseline_rollouts": {"loss", "correction"},
            "gigpo": {"advantage", "loss", "proximal"},
        }[arm]
    )


def test_a_run_below_the_bar_has_no_version() -> None:
    assert figures(RUNS, 0.96) == {
        "versions_to_bar.clip.8": [20, None, None],
        "accuracy_end.clip.8": 0.9,
    }
    assert "| 8 | `clip` | 20, never, never | 0.900 | 0.595 | 80 |" in table(RUNS, 0.96)


def test_rows_are_in_the_order_of_their_ages() -> None:
    rows = table([{**RUNS[0], "age": age} for age in (16, "0+16", 8, 0)], 0.96).splitlines()[2:]
    assert [row.split()[1] for row in rows] == ["0", "0+16", "8", "16"]


def test_the_plot_has_arms_that_there_are(tmp_path: Path) -> None:
    assert {arm for arm, _ in PLOTTED} <= ARMS.keys()
    draw(RUNS, tmp_path / "figures" / "plot.svg")
    assert "8 versions old: clip" in (tmp_path / "figures" / "plot.svg").read_text("utf-8")
