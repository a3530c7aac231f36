"""The profile of a window of versions: written once, of these alone, and never a reason for a run to end."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch

from asyncrl.config.schema import Config, LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.reporting.profile import ProfileWindow


def train(window: ProfileWindow, versions: range) -> None:
    """A step has a product of matrices of the size of its version."""
    for version in versions:
        window.begin(version)
        with torch.profiler.record_function(f"step to version {version}"):
            torch.ones(version, version) @ torch.ones(version, version)
    window.close()


def steps(file: Path) -> list[str]:
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    return sorted({event["name"] for event in events if str(event.get("name")).startswith("step to")})


def test_the_file_has_the_steps_of_the_window(tmp_path: Path) -> None:
    train(ProfileWindow(tmp_path, (2, 3), rank=1), range(1, 6))
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "learner-rank-1.v000002-v000003.json.gz"
    assert steps(file) == ["step to version 2", "step to version 3"]


def test_a_run_that_begins_and_ends_inside_has_its_steps(tmp_path: Path) -> None:
    train(ProfileWindow(tmp_path, (2, 9), rank=0), range(4, 6))
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "learner-rank-0.v000004-v000005.json.gz"
    assert steps(file) == ["step to version 4", "step to version 5"]


def test_without_a_window_the_profiler_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.profiler, "profile", None)
    train(ProfileWindow(tmp_path, None, rank=0), range(1, 4))
    assert not [*tmp_path.iterdir()]


def test_a_profiler_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("a file in its way")
    with caplog.at_level(logging.WARNING):
        train(ProfileWindow(tmp_path, (1, 2), rank=0), range(1, 6))
    (record,) = [each for each in caplog.records if "torch.profiler fails" in each.getMessage()]
    assert "goes on without a profile" in record.getMessage()
    (tmp_path / "profile").unlink()
    train(ProfileWindow(tmp_path, (1, 1), rank=0), range(1, 2))  # it was stopped all the same
    assert len([*(tmp_path / "profile").iterdir()]) == 1


@pytest.mark.parametrize("window", [(3,), (0, 2), (4, 3), (1, 2, 3)])
def test_a_window_that_is_none_is_refused(window: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"learner\.profile_versions.*is no first and last version"):
        Config(learner=LearnerConfig(profile_versions=window))
