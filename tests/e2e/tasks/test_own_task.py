"""A user's own script: own tasks, own reward, own model."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_functions import four_tasks, half_right, misspelt
from processes import ran, summary_of

import asyncrl
from asyncrl.errors import AsyncRLError, ConfigError

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_example_trains(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    printed = ran(
        "examples/own_task.py", str(model_folder), f"run.dir={tmp_path}", "run.versions=3", executed=True
    )
    assert "reward 0." in printed
    summary = summary_of(tmp_path / "own-task")
    assert summary["groups_trained"] == 24


@pytest.mark.slow
def test_a_source_that_ends_ends_the_run(config_file: Path) -> None:
    summary = asyncrl.train(
        config_file, ["run.versions=100", "evaluation.source=null"], tasks=four_tasks, reward=half_right
    )
    assert (summary["versions"], summary["groups_trained"]) == (2, 6)


def test_functions_that_no_other_process_can_import_are_refused(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^reward = .*define it with def"):
        asyncrl.train(config_file, reward=lambda task, text: 1.0)


def test_a_reward_with_a_mistake_in_it_ends_the_run_by_what_it_raised(config_file: Path) -> None:
    """Before a version is trained, and after a few dozen tasks."""
    with pytest.raises(AsyncRLError) as ending:
        asyncrl.train(config_file, reward=misspelt)
    assert "RewardFailedError: reward.function = " in str(ending.value)
    assert "own_functions.py:misspelt' failed at each of the first 32 tasks" in str(ending.value)
    assert "raised KeyError: 'anwser' (own_functions.py:" in str(ending.value)
