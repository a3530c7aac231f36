"""Findings on a terminal: those of a run as text, and new ones of a live run, each one once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from processes import until

from asyncrl.cli import main
from asyncrl.launch.views.findings import MOST_ROWS, LiveFindings, warnings_beside
from asyncrl.observability.doctor.facts import RunFacts
from asyncrl.observability.run_files import RunFiles

HOSTILE = "generator-\x1b[2J\u202e0"


def append(folder: Path, count: int, first: int = 1, **columns: Any) -> None:
    """Rows of versions. `__` in a name stands for a slash."""
    folder.mkdir(exist_ok=True)
    row = {"perf/step_s": 1.0} | {name.replace("__", "/"): value for name, value in columns.items()}
    with (folder / "metrics.jsonl").open("a") as file:
        for version in range(first, first + count):
            file.write(json.dumps({"version": version, "time": 1e9 + version, **row}) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    append(folder, 20, rollout__length__truncated=0.0)
    return folder


def trace(run: Path, name: str, *rows: dict[str, Any]) -> None:
    (run / "trace").mkdir(exist_ok=True)
    head = {"t": 1e9, "process": name, "role": name.partition("-")[0], "host": "a", "pid": 1}
    text = "".join(json.dumps(row) + "\n" for row in (head, *rows))
    (run / "trace" / f"{name}.jsonl").write_text(text)


def test_a_run_without_findings_has_the_list_of_what_was_looked_at(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(run)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("first: silent, version 20. ")
    assert "Nothing was found. Looked at:\n  bottleneck " in text
    assert "Too few versions yet to look at: reward falls." in text
    assert "No traces (telemetry.trace_mb) to look at: straggler, silent, stall, restarts." in text
    assert "  silent " not in text


def test_findings_as_text_and_for_programs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.yaml").write_text("generator: {max_tokens: 100}\n")
    append(run, 20, 21, rollout__length__truncated=0.5, rollout__length__mean=70)
    assert main(["doctor", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "warning   A limit cuts off 50 % of the rollouts."
    assert any(line.strip().startswith("Try generator.max_tokens=200") for line in lines)
    assert main(["doctor", str(run), str(run), "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [answer["run"] for answer in answers] == ["first", "first"]
    (finding,) = answers[0]["findings"]
    assert (finding["key"], finding["value"], finding["severity"]) == (
        "generator.max_tokens",
        "200",
        "warning",
    )
    assert "limits" in answers[0]["looked_at"]


def test_names_of_processes_cannot_steer_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    died = {"t": 1e9 + 1, "event": "ended", "process": HOSTILE, "code": 1}
    trace(run, "launcher", died, {"t": 1e9 + 20})
    for command in (["doctor", str(run)], ["top", str(run), "--once"]):
        assert main(command) == 0
        text = capsys.readouterr().out
        assert "has died once" in text
        assert "\x1b[2J" not in text
        assert "\u202e" not in text


def test_the_head_of_a_run_cannot_steer_the_terminal_either(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name, and how its summary says that it ended."""
    hostile = run.rename(run.with_name("first\x1b[2J"))
    (hostile / "summary.json").write_text(json.dumps({"ended": "done\u202e", "versions": 20}))
    assert main(["doctor", str(hostile)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("first[2J: done , version 20.")


def test_a_process_without_a_proper_name_leads_to_no_file_elsewhere(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace(run, "launcher", {"t": 1e9 + 1, "event": "ended", "process": "../../outside", "code": 1})
    (run / "logs").mkdir()
    (run.parent / "outside.log").write_text("asyncrl generator: a secret\n")
    assert main(["doctor", str(run)]) == 0
    text = capsys.readouterr().out
    assert "../../outside has died once." in text
    assert "a secret" not in text


def test_rules_look_at_a_run_that_is_over_as_of_its_last_sign_of_life(run: Path) -> None:
    files = RunFiles(run)
    files.read()
    assert (files.run_state(), RunFacts.of(files).now) == ("silent", 1e9 + 20)


def test_a_folder_that_is_none_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_a_folder_of_something_else_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["doctor"], ["top", "--once"], ["report"], ["trace"], ["dash"]):
        assert main([*command, str(tmp_path)]) == 2
        assert "holds none of config.yaml, metrics.jsonl, trace" in capsys.readouterr().err


def test_a_run_without_rows_has_no_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").touch()
    assert main(["doctor", str(tmp_path)]) == 0
    assert "Nothing was found." in capsys.readouterr().out
    assert main(["top", str(tmp_path), "--once"]) == 0
    assert main(["trace", str(tmp_path), "--output", str(tmp_path / "trace.json.gz")]) == 2
    assert "has no traces" in capsys.readouterr().err


def test_a_cause_is_taken_from_the_log(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace(
        run,
        "launcher",
        {"t": 1e9 + 1, "event": "ended", "process": "generator-0", "code": 1},
        {"t": 1e9 + 20},
    )
    (run / "logs").mkdir()
    (run / "logs" / "generator-0.log").write_text(
        "Traceback (most recent call last):\n  File\nValueError: no\n"
    )
    assert main(["doctor", str(run)]) == 0
    assert "exit code 1: ValueError: no" in capsys.readouterr().out


def test_a_live_finding_comes_once(run: Path) -> None:
    live = LiveFindings(RunFiles(run))
    assert live.new() == []
    append(run, 20, 21, rollout__length__truncated=0.5)
    assert [finding.rule for finding in live.new()] == ["limits"]
    append(run, 5, 41, rollout__length__truncated=0.6)
    assert live.new() == []


def test_a_note_is_no_warning_of_a_live_run(run: Path) -> None:
    append(run, 20, 21, queue__dropped__filtered=900, queue__trained=100)
    live = LiveFindings(RunFiles(run))
    assert [(finding.rule, finding.severity) for finding in live.all()] == [("drops", "note")]
    assert live.new() == []


def test_lanes_that_no_rule_looks_at_are_forgotten(run: Path) -> None:
    append(run, 3000, 21)
    spans = [{"t": 1e9 + at, "took": 0.5, "lane": "rollouts", "do": "generate"} for at in range(1, 3020)]
    figures = [{"t": 1e9 + at, "values": {"sync/held": at}} for at in (1, 3019)]
    trace(run, "generator-0", *spans, *figures)
    live = LiveFindings(RunFiles(run))
    live.new()
    process = live._run.timeline.processes["generator-0"]
    assert [span.start for span in process.lanes["rollouts"].spans[:1]] == [1e9 + 3020 - 200 + 1 - 0.5]
    assert process.figures["sync/held"] == ([1e9 + 3019], [3019])


def test_a_long_run_is_looked_at_whole_in_few_rows(run: Path) -> None:
    live = LiveFindings(RunFiles(run))
    few = MOST_ROWS // 10
    for first in range(21, 4 * MOST_ROWS, few):
        append(run, few, first)
        live.all()
    versions = [row["version"] for row in live._run.metrics.versions]
    assert versions[0] == 1
    assert len(versions) <= MOST_ROWS
    newest = MOST_ROWS // 3
    assert versions[-newest:] == [*range(versions[-1] - newest + 1, versions[-1] + 1)]


def test_the_thread_gives_lines_and_outlives_damage(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    append(run, 20, 21, rollout__length__truncated=0.5)
    with warnings_beside(run, every_s=0.01) as found:
        lines: list[str] = []
        until(lambda: lines.extend(found()) or lines, "a finding")
        assert lines[0].startswith("warning: A limit cuts off 50 % of the rollouts. versions 21 to 40")
        shutil.rmtree(run)
        run.write_text("no folder any more")
        until(lambda: "metrics.jsonl is not read" in caplog.text, "a look at what is no folder")
        assert found() == []


def test_an_error_ends_the_looking_and_not_the_run(
    run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LiveFindings, "new", lambda self: 1 / 0)
    with warnings_beside(run, every_s=0.01) as found:
        until(lambda: "it goes on" in caplog.text, "the end of looking")
        assert found() == []


def test_lines_of_a_live_run_cannot_steer_the_terminal_and_no_error_ends_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the error is."""
    trace(run, "launcher", {"t": 1e9 + 1, "event": "ended", "process": HOSTILE, "code": 1})
    with warnings_beside(run, every_s=0.01) as found:
        lines: list[str] = []
        until(lambda: lines.extend(found()) or lines, "a finding")
        assert lines[0].startswith("warning: generator-[2J 0 has died once. last at ")
        monkeypatch.setattr(LiveFindings, "new", lambda live: {}["no such key"])
        until(lambda: "it goes on" in caplog.text, "the end of looking")
