"""Whole runs with an engine that is wrong: each is found out within a few versions, and ends by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import counts_of, finished, rows, started, succeeded, versions

from asyncrl.errors import AsyncRLError, BehaviourMismatchError, DeadlineError, WeightSyncError

pytestmark = pytest.mark.slow

ENGINES = Path(__file__).parents[1].joinpath("faulty_engines.py")


def ended_by(config: Path, error: type[AsyncRLError], engine: str, *words: str) -> str:
    """What the launcher says of a run that would take long with this engine, and ends soon by this error."""
    own = f"generator.own_engine={ENGINES}:{engine}"
    with started("asyncrl", "train", str(config), own, "run.versions=1000", *words) as launcher:
        code, printed = finished(launcher)
    assert code == error.exit_code, printed
    return printed


def test_the_hash_finds_a_weight_that_is_not_the_learners(config_file: Path) -> None:
    printed = ended_by(config_file, WeightSyncError, "heavier", "launch.generator_restarts=0")
    assert f"generator-0 ended (exit code {WeightSyncError.exit_code})" in printed
    assert "WeightSyncError: generator-0: after the flip to version " in printed
    assert "the engine's parameters do not hash to" in printed
    # Nothing of those weights was trained on: groups are committed after the flip is verified.
    assert all(row["version"] <= 4 for row in rows(config_file.parent / "it"))


def test_an_engine_that_hangs_ends_its_generator_by_name_and_the_next_one_goes_on(config_file: Path) -> None:
    """A step of the model never ends: the process does, although the thread in that step does not."""
    run = config_file.parent / "it"
    words = ("generator.progress_deadline_s=3", "run.versions=3", f"generator.own_engine={ENGINES}:hanging")
    with started("asyncrl", "train", str(config_file), *words) as launcher:
        printed = succeeded(launcher)
    assert f"generator-0 ended (exit code {DeadlineError.exit_code}) and is started again, 1 of 3" in printed
    assert versions(run) == [1, 2, 3]
    assert counts_of(run) == (3, 12, 0)


def test_the_log_probs_find_it_where_nothing_is_hashed(config_file: Path) -> None:
    printed = ended_by(config_file, BehaviourMismatchError, "heavier", "sync.verify=false")
    assert f"learner ended (exit code {BehaviourMismatchError.exit_code})" in printed
    assert "heavier' and the learner disagree on 4 tokens of version " in printed
    assert "(generator-0)" in printed


def test_the_log_probs_find_a_temperature_that_is_not_on_record(config_file: Path) -> None:
    """In the first step, which is not taken. (Groups whose rewards are all alike make no pass, unless told to.)"""
    printed = ended_by(config_file, BehaviourMismatchError, "hotter", "learner.skip_flat_groups=false")
    assert f"learner ended (exit code {BehaviourMismatchError.exit_code})" in printed
    assert "hotter' and the learner disagree on " in printed
    assert " tokens of version 0" in printed
    assert rows(config_file.parent / "it") == []
