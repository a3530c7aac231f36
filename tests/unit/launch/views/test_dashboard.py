from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from asyncrl.config.schema import Config
from asyncrl.launch.views.dashboard import (
    COLUMNS,
    LINE_LENGTH,
    LineDashboard,
    LiveDashboard,
    RunView,
    open_dashboard,
    print_summary,
    status_line,
)


def append(path: Path, *rows: dict[str, float]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def shown(progress: RunView) -> dict[str, str]:
    return {value.label: value.text for value in progress.values()}


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_time_left_is_counted_from_the_first_version(metrics: Path, tmp_path: Path) -> None:
    progress = RunView(Config(), tmp_path)
    append(metrics, {"time": 100.0, "version": 0})
    progress.read()
    assert progress.seconds_left() is None
    append(metrics, {"time": 200.0, "version": 1}, {"time": 220.0, "version": 11})
    progress.read()
    assert progress.seconds_left() == 2.0 * (progress.versions - 11)


def test_an_evaluation_does_not_set_the_version_back(metrics: Path, tmp_path: Path) -> None:
    progress = RunView(Config(), tmp_path)
    append(metrics, {"time": 1.0, "version": 4}, {"time": 2.0, "version": 0, "eval/accuracy": 0.375})
    progress.read()
    assert progress.version == 4


def test_values_outlive_rows_without_them(metrics: Path, tmp_path: Path) -> None:
    progress = RunView(Config(), tmp_path)
    append(metrics, {"time": 1.0, "version": 1, "eval/accuracy": 0.375})
    append(metrics, {"time": 2.0, "version": 2, "rollout/reward/mean": 0.5})
    progress.read()
    assert shown(progress) == {"reward": "0.500", "held-out accuracy": "37.5%"}


def test_answers_without_a_score_are_those_of_the_last_evaluation(metrics: Path, tmp_path: Path) -> None:
    progress = RunView(Config(), tmp_path)
    append(metrics, {"time": 1.0, "version": 0, "eval/accuracy": 0.0, "eval/unscored": 40.0})
    progress.read()
    assert shown(progress)["held-out answers without a score"] == "40"
    append(metrics, {"time": 2.0, "version": 1, "eval/accuracy": 0.5, "eval/unscored": 0.0})
    progress.read()
    assert shown(progress) == {"held-out accuracy": "50.0%"}


def test_lines_for_a_pipe_tell_each_evaluation(metrics: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    dashboard = LineDashboard(RunView(Config(), tmp_path), Console(file=out, width=200))
    append(metrics, {"time": 1.0, "version": 1, "rollout/reward/mean": 0.5})
    dashboard.refresh()
    append(metrics, {"time": 2.0, "version": 1, "eval/accuracy": 0.25})
    dashboard.refresh()
    dashboard.refresh()
    assert out.getvalue() == "version 1 of 100  reward 0.500  held-out 25.0%\n"


def test_the_wait_for_the_first_version_gets_a_line_every_five_seconds(metrics: Path, tmp_path: Path) -> None:
    now = [100.0]
    out = io.StringIO()
    progress = RunView(Config(), tmp_path, clock=lambda: now[0])
    dashboard = LineDashboard(progress, Console(file=out, width=200), clock=lambda: now[0])
    for _ in range(14):
        now[0] += 1.0
        dashboard.refresh()
    wait = "version 0 of 100  waiting for the learner and the first groups"
    assert out.getvalue() == f"{wait} (5 s)\n{wait} (10 s)\n"
    append(metrics, {"time": 1.0, "version": 1})
    now[0] += 10.0
    dashboard.refresh()
    assert out.getvalue().endswith("(10 s)\nversion 1 of 100\n")


def test_a_line_has_at_most_120_characters_and_whole_values(metrics: Path, tmp_path: Path) -> None:
    progress = RunView(Config(), tmp_path)
    every = {key: 123_456.789 for _, _, key, _ in COLUMNS}
    append(metrics, {"time": 0.0, "version": 0, **every}, {"time": 1.0, "version": 1})
    append(metrics, {"time": 7200.0, "version": 2})
    progress.read()
    line = status_line(progress)
    assert 100 < len(line) <= LINE_LENGTH
    start, *values = line.split("  ")
    assert start == "version 2 of 100, 195 h 58 min left"
    assert set(values) <= {f"{value.short} {value.text}" for value in progress.values()}
    assert len([*progress.values()]) == len(COLUMNS)  # the table has all of them


def test_without_a_terminal_there_are_lines(tmp_path: Path) -> None:
    with open_dashboard(Config(), RunView(Config(), tmp_path)) as dashboard:
        assert isinstance(dashboard, LineDashboard)


HOSTILE = "raised ValueError: unbalanced tag [/bold] \x1b[2J"


def test_text_of_a_user_is_no_markup_and_moves_no_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Notes(RunView):
        def read(self) -> bool:
            return True

        def notes(self) -> list[str]:
            return [HOSTILE]

    progress = Notes(Config(), tmp_path)
    for made in (LineDashboard, LiveDashboard):
        console = Console(file=io.StringIO(), width=200)
        if made is LiveDashboard:
            with Live(console=console, auto_refresh=False) as live:
                LiveDashboard(progress, live, "[/name]").refresh()
        else:
            LineDashboard(progress, console).print_line(status_line(progress))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "unbalanced tag [/bold] [2J" in text
        assert "\x1b" not in text
    monkeypatch.setenv("COLUMNS", "200")
    print_summary({"why": HOSTILE, "[/key]": 1.0}, tmp_path / "[")
    assert "[/key]" in (text := capsys.readouterr().out)
    assert "unbalanced tag [/bold] [2J" in text
