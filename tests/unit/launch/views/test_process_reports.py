"""What launched processes report: that they have loaded and live, warnings, and drops with why the last one was."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from processes import until
from rich.console import Console
from waiting import Clock

from asyncrl.config.schema import Config
from asyncrl.launch.views import process_reports
from asyncrl.launch.views.dashboard import STILL_S, LineDashboard, RowTail, RunView
from asyncrl.launch.views.process_reports import SILENT_S, SUFFIX, ProcessReports, reported
from asyncrl.learner.reporting.report import run_summary, step_row
from asyncrl.telemetry.status import ProcessStatus

WHY = "the reward of task 9 raised KeyError: 'anwser' (x.py:3)"


def write(logs: Path, name: str, dropped: dict[str, int], last: str = "", **calls: dict[str, int]) -> None:
    logs.mkdir(exist_ok=True)
    told = {"dropped": dropped, "late": {}, "under_way": {}, **calls, "last": last}
    (logs / f"{name}{SUFFIX}").write_text(json.dumps(told))


def test_a_process_reports_what_it_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_reports, "EVERY_S", 0.01)
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
    reports = ProcessReports(tmp_path)
    reports.read()
    assert reports.new_warnings() == ["generator-0 warns: reward.weights names rigth"]
    assert reports.new_warnings() == []
    reports.read()
    assert reports.text() == ""


def test_drops_are_counted_over_processes_and_since_a_version(tmp_path: Path) -> None:
    reports = ProcessReports(tmp_path)
    reports.read()
    assert reports.text() == ""
    write(tmp_path, "generator-0", {"reward": 30}, WHY)
    write(tmp_path, "generator-1", {"reward": 1, "filtered": 40})
    reports.read()
    assert reports.text() == f"tasks dropped: filtered 40, reward 31; the last one: {WHY}"
    reports.begin_anew()
    assert reports.text() == ""
    write(tmp_path, "generator-1", {"reward": 2, "filtered": 40})
    reports.read()
    assert reports.text() == f"tasks dropped: reward 1; the last one: {WHY}"


def test_calls_that_take_too_long_are_told_before_any_task_is_dropped(tmp_path: Path) -> None:
    reports = ProcessReports(tmp_path)
    write(tmp_path, "generator-0", {}, late={"x.py:slow": 4}, under_way={"x.py:slow": 64})
    write(tmp_path, "generator-1", {}, late={"x.py:slow": 1}, under_way={"x.py:slow": 8})
    reports.read()
    assert reports.text() == "calls of reward x.py:slow that took too long: 5, under way: 72"
    reports.begin_anew()
    assert reports.text() == ""


def test_the_launcher_shows_them_while_no_version_comes(tmp_path: Path) -> None:
    clock, console = Clock(), Console(file=io.StringIO(), width=300)
    reports = ProcessReports(tmp_path / "logs", clock)
    progress = RunView(Config(), tmp_path, reports, clock)
    dashboard = LineDashboard(progress, console, every_s=10.0, clock=clock)

    def printed() -> list[str]:
        reports.read()
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
    summary = run_summary(rows, **told, dropped={"reward": 9708, "too_long": 1})  # type: ignore[arg-type]
    assert summary["tasks_dropped"] == 9709
    assert summary["tasks_dropped_by_reason"] == {"reward": 9708, "too_long": 1}
    assert run_summary([], **told, dropped={"reward": 40})["tasks_dropped"] == 40  # type: ignore[arg-type]
    summary = run_summary(rows, **told)  # type: ignore[arg-type]
    assert (summary["tasks_dropped"], summary["tasks_dropped_by_reason"]) == (3, {"reward": 3})


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"dropped": 3, "last": ""}', '{"dropped": {"a": "b"}, "last": ""}']
)
def test_a_damaged_file_counts_for_nothing(tmp_path: Path, text: str) -> None:
    write(tmp_path, "generator-0", {"reward": 3}, WHY)
    (tmp_path / f"generator-1{SUFFIX}").write_text(text)
    reports = ProcessReports(tmp_path)
    reports.read()
    assert reports.text() == f"tasks dropped: reward 3; the last one: {WHY}"
    assert reports.new_warnings() == []


def test_a_damaged_row_does_not_end_the_view(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'garbage\n[1]\n\xff\n{"version": 3}\n')
    assert RowTail(tmp_path / "metrics.jsonl").new_rows() == [{"version": 3}]


def test_a_process_is_loading_until_its_report_and_silent_once_that_gets_old(tmp_path: Path) -> None:
    clock = Clock()
    reports = ProcessReports(tmp_path, clock)
    for name in ("learner", "generator-0"):
        reports.started(name)
    write(tmp_path, "generator-0", {})
    clock.now = 40.0
    reports.read()
    assert (reports.loading(), reports.silent()) == ({"learner": 40.0}, {})
    write(tmp_path, "learner", {})
    for clock.now in (50.0, 50.0 + SILENT_S):
        os.utime(tmp_path / f"generator-0{SUFFIX}", (clock.now, clock.now))
        reports.read()
    assert (reports.loading(), reports.silent()) == ({}, {"learner": SILENT_S})
    reports.started("learner")  # again: its first report does not count any more
    reports.read()
    assert (reports.loading(), reports.silent()) == ({"learner": 0.0}, {})
    reports.ended("learner")
    assert reports.loading() == {}


def test_a_process_gives_a_sign_of_life_once_it_has_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_reports, "EVERY_S", 0.001)
    status, path = ProcessStatus(), tmp_path / f"learner{SUFFIX}"
    with reported(path, status):
        assert not path.exists()
        status.loaded.set()
        for _ in range(2):
            until(path.exists, "report")
            os.utime(path, (0, 0))
            until(lambda: path.stat().st_mtime > 0, "report after the first")


def test_the_launcher_names_who_is_loading_and_who_is_silent(tmp_path: Path) -> None:
    clock = Clock()
    reports = ProcessReports(tmp_path / "logs", clock)
    progress = RunView(Config(), tmp_path, reports, clock)
    reports.started("learner")
    clock.now = 20.0
    reports.started("generator-0")
    clock.now = 35.0
    wait = "waiting for the learner and the first groups (35 s)"
    assert progress.notes() == [f"{wait}; loading: learner 35 s, generator-0 15 s"]
    write(tmp_path / "logs", "learner", {})
    write(tmp_path / "logs", "generator-0", {})
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"time": 1.0, "version": 1}) + "\n")
    reports.read()
    progress.read()
    assert progress.notes() == []
    quiet = progress.alert()
    clock.now += 75.0
    assert progress.notes() == ["no word from learner 1 min 15 s, generator-0 1 min 15 s"]
    assert progress.alert() != quiet


def test_a_process_that_loads_again_is_named_while_no_version_comes(tmp_path: Path) -> None:
    clock = Clock()
    reports = ProcessReports(tmp_path / "logs", clock)
    progress = RunView(Config(), tmp_path, reports, clock)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"time": 1.0, "version": 1}) + "\n")
    progress.read()
    clock.now = 20.0
    assert progress.notes() == []
    reports.started("learner")
    clock.now = 30.0
    assert progress.notes() == ["no new version for 30 s; loading: learner 10 s"]
