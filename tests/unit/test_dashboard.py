from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.config.schema import Config
from asyncrl.launch.dashboard import LineDashboard, Progress, RowTail, open_dashboard


def append(path: Path, *rows: dict[str, float]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_rows_are_read_once_and_only_when_whole(metrics: Path) -> None:
    tail = RowTail(metrics)
    assert tail.new_rows() == []
    append(metrics, {"version": 1}, {"version": 2})
    with metrics.open("a") as file:
        file.write('{"version"')
    assert tail.new_rows() == [{"version": 1}, {"version": 2}]
    assert tail.new_rows() == []
    with metrics.open("a") as file:
        file.write(": 3}\n")
    assert tail.new_rows() == [{"version": 3}]


def test_a_replaced_file_is_read_from_its_start(metrics: Path, tmp_path: Path) -> None:
    tail = RowTail(metrics)
    append(metrics, {"version": 1}, {"version": 2})
    tail.new_rows()
    append(tmp_path / "shorter", {"version": 1})
    os.replace(tmp_path / "shorter", metrics)
    assert tail.new_rows() == [{"version": 1}]


def test_time_left_is_counted_from_the_first_version(metrics: Path, tmp_path: Path) -> None:
    progress = Progress(Config(), tmp_path)
    append(metrics, {"time": 100.0, "version": 0})
    progress.read()
    assert progress.seconds_left() is None
    append(metrics, {"time": 200.0, "version": 1}, {"time": 220.0, "version": 11})
    progress.read()
    assert progress.seconds_left() == 2.0 * (progress.versions - 11)


def test_an_evaluation_does_not_set_the_version_back(metrics: Path, tmp_path: Path) -> None:
    progress = Progress(Config(), tmp_path)
    append(metrics, {"time": 1.0, "version": 4}, {"time": 2.0, "version": 0, "heldout/accuracy": 0.375})
    progress.read()
    assert progress.version == 4


def test_values_outlive_rows_without_them(metrics: Path, tmp_path: Path) -> None:
    progress = Progress(Config(), tmp_path)
    append(metrics, {"time": 1.0, "version": 1, "heldout/accuracy": 0.375})
    append(metrics, {"time": 2.0, "version": 2, "reward/mean": 0.5})
    progress.read()
    assert dict(progress.values()) == {"reward": "0.500", "held-out accuracy": "37.5%"}


def test_answers_without_a_score_are_those_of_the_last_evaluation(metrics: Path, tmp_path: Path) -> None:
    progress = Progress(Config(), tmp_path)
    append(metrics, {"time": 1.0, "version": 0, "heldout/accuracy": 0.0, "heldout/unscored": 40.0})
    progress.read()
    assert dict(progress.values())["held-out answers without a score"] == "40"
    append(metrics, {"time": 2.0, "version": 1, "heldout/accuracy": 0.5, "heldout/unscored": 0.0})
    progress.read()
    assert dict(progress.values()) == {"held-out accuracy": "50.0%"}


def test_lines_for_a_pipe_tell_each_evaluation(metrics: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    dashboard = LineDashboard(Progress(Config(), tmp_path), Console(file=out, width=200))
    append(metrics, {"time": 1.0, "version": 1, "reward/mean": 0.5})
    dashboard.refresh()
    append(metrics, {"time": 2.0, "version": 1, "heldout/accuracy": 0.25})
    dashboard.refresh()
    dashboard.refresh()
    assert out.getvalue() == "version 1 of 100  reward 0.500  held-out accuracy 25.0%\n"


def test_without_a_terminal_there_are_lines(tmp_path: Path) -> None:
    with open_dashboard(Config(), tmp_path) as dashboard:
        assert isinstance(dashboard, LineDashboard)
