"""Tasks that are dropped are shown while no version comes, with why the last one was."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.config.schema import Config
from asyncrl.launch.views import drops
from asyncrl.launch.views.dashboard import STILL_S, LineDashboard, RowTail, RunProgress
from asyncrl.launch.views.drops import SUFFIX, Drops, reported
from asyncrl.learner.reporting.report import step_row, summarise
from asyncrl.telemetry.status import ProcessStatus

WHY = "the reward of task 9 raised KeyError: 'anwser' (x.py:3)"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def write(logs: Path, name: str, dropped: dict[str, int], last: str = "", **calls: dict[str, int]) -> None:
    logs.mkdir(exist_ok=True)
    told = {"dropped": dropped, "late": {}, "under_way": {}, **calls, "last": last}
    (logs / f"{name}{SUFFIX}").write_text(json.dumps(told))


def test_a_process_reports_what_it_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drops, "EVERY_S", 0.01)
    status, path = ProcessStatus(), tmp_path / f"generator-0{SUFFIX}"
    with reported(path, status):
        status.loaded.set()
        status.failure = WHY
        drops_of_a_worker = {"dropped/reward": 3, "dropped/filtered": 1, "late/x.py:f": 2}
        status.figures = {"tokens": 7, **drops_of_a_worker, "under_way/x.py:g": 8}
    assert json.loads(path.read_text()) == {
        "dropped": {"reward": 3, "filtered": 1},
        "late": {"x.py:f": 2},
        "under_way": {},
        "last": WHY,
        "warning": "",
    }
    quiet = tmp_path / f"generator-1{SUFFIX}"
    with reported(quiet, ProcessStatus()):
        pass
    assert not quiet.exists()


def test_a_warning_of_a_process_is_returned_once(tmp_path: Path) -> None:
    status = ProcessStatus()
    with reported(tmp_path / f"generator-0{SUFFIX}", status):
        status.warning = "reward.weights names rigth"
    dropped = Drops(tmp_path)
    assert dropped.warnings() == ["generator-0 warns: reward.weights names rigth"]
    assert dropped.warnings() == []
    dropped.read()
    assert dropped.text() == ""


def test_drops_are_counted_over_processes_and_since_a_version(tmp_path: Path) -> None:
    dropped = Drops(tmp_path)
    dropped.read()
    assert dropped.text() == ""
    write(tmp_path, "generator-0", {"reward": 30}, WHY)
    write(tmp_path, "generator-1", {"reward": 1, "filtered": 40})
    dropped.read()
    assert dropped.text() == f"tasks dropped: filtered 40, reward 31; the last one: {WHY}"
    dropped.begin_anew()
    assert dropped.text() == ""
    write(tmp_path, "generator-1", {"reward": 2, "filtered": 40})
    dropped.read()
    assert dropped.text() == f"tasks dropped: reward 1; the last one: {WHY}"


def test_calls_that_take_too_long_are_told_before_any_task_is_dropped(tmp_path: Path) -> None:
    dropped = Drops(tmp_path)
    write(tmp_path, "generator-0", {}, late={"x.py:slow": 4}, under_way={"x.py:slow": 64})
    write(tmp_path, "generator-1", {}, late={"x.py:slow": 1}, under_way={"x.py:slow": 8})
    dropped.read()
    assert dropped.text() == "calls of reward x.py:slow that took too long: 5, under way: 72"
    dropped.begin_anew()
    assert dropped.text() == ""


def test_the_launcher_shows_them_while_no_version_comes(tmp_path: Path) -> None:
    clock, console = Clock(), Console(file=io.StringIO(), width=300)
    progress = RunProgress(Config(), tmp_path, clock)
    dashboard = LineDashboard(progress, console, every_s=10.0, clock=clock)

    def printed() -> list[str]:
        dashboard.refresh()
        text = console.file.getvalue()  # type: ignore[attr-defined]
        console.file = io.StringIO()
        return text.splitlines()

    write(tmp_path / "logs", "generator-0", {"reward": 31}, WHY)
    clock.now = STILL_S - 1
    assert printed() == []
    clock.now = STILL_S
    assert printed() == [
        f"version 0 of 100  no new version for 5 s: tasks dropped: reward 31; the last one: {WHY}"
    ]
    clock.now = STILL_S + 1
    assert printed() == []  # not every second
    write(tmp_path / "logs", "generator-0", {"reward": 95}, WHY)
    clock.now = STILL_S + 10
    assert "no new version for 15 s: tasks dropped: reward 95;" in printed()[0]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"time": 1.0, "version": 1}) + "\n")
    clock.now += 10
    assert "dropped" not in printed()[0]
    assert printed() == []


def test_the_summary_counts_what_was_dropped_after_the_last_row() -> None:
    depth = {"dropped": 3, "dropped_by_reason": {"reward": 3}}
    rows = [step_row(1, {}, {"work": 1.0}, depth, {})]
    told = {"max_staleness": 1, "wall_s": 1.0, "ended": "stopped"}
    summary = summarise(rows, **told, dropped={"reward": 9708, "too_long": 1})  # type: ignore[arg-type]
    assert summary["tasks_dropped"] == 9709
    assert summary["tasks_dropped_by_reason"] == {"reward": 9708, "too_long": 1}
    assert summarise([], **told, dropped={"reward": 40})["tasks_dropped"] == 40  # type: ignore[arg-type]
    summary = summarise(rows, **told)  # type: ignore[arg-type]
    assert (summary["tasks_dropped"], summary["tasks_dropped_by_reason"]) == (3, {"reward": 3})


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"dropped": 3, "last": ""}', '{"dropped": {"a": "b"}, "last": ""}']
)
def test_a_damaged_file_counts_for_nothing(tmp_path: Path, text: str) -> None:
    write(tmp_path, "generator-0", {"reward": 3}, WHY)
    (tmp_path / f"generator-1{SUFFIX}").write_text(text)
    dropped = Drops(tmp_path)
    dropped.read()
    assert dropped.text() == f"tasks dropped: reward 3; the last one: {WHY}"
    assert dropped.warnings() == []


def test_a_damaged_row_does_not_end_the_view(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'garbage\n[1]\n\xff\n{"version": 3}\n')
    assert RowTail(tmp_path / "metrics.jsonl").new_rows() == [{"version": 3}]
