"""The report: one file that requests nothing, and that no text of a run can break out of."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import main
from asyncrl.observability import report
from asyncrl.observability.dash.page_data import MOST_PROCESSES, PageData
from asyncrl.observability.report import write_report

HOSTILE = "</script><script>window.stolen = 1</script><!-- </body>"


def embedded(page: str) -> list[dict[str, Any]]:
    """The data of each run."""
    (text,) = re.findall(r'<script type="application/json" id="embedded">(.*?)</script>', page, re.DOTALL)
    return list(json.loads(text)["runs"])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "first"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "a.png").write_bytes(b"a picture")
    (tmp_path / "outside.png").write_bytes(b"secret")
    rows = [{"version": 1, "time": 1.0, "perf/step_s": 1.0, "rollout/reward/mean": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollout = {"version": 1, "ordinal": 3, "prompt": "1+1=", "answer": HOSTILE, "reward": 1.0}
    images = ["images/a.png", "../../outside.png"]
    (folder / "rollouts.jsonl").write_text(json.dumps({**rollout, "images": images}) + "\n")
    (folder / "config.yaml").write_text(f"model: {{path: {tmp_path}/model}}\nqueue: {{keys: secret-keys}}\n")
    return folder


def test_the_data_is_in_the_file_and_breaks_out_of_nothing(run: Path, tmp_path: Path) -> None:
    write_report([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert HOSTILE not in page
    (data,) = embedded(page)
    assert data["state"]["metrics"]["rollout/reward/mean"] == [0.5]
    assert data["rollouts"]["rows"][0]["answer"] == HOSTILE
    assert data["images"] == {
        "images/a.png": "data:image/png;base64," + base64.b64encode(b"a picture").decode()
    }
    assert str(tmp_path) not in page  # neither that of the run nor that of its model
    assert "secret-keys" not in page


def test_findings_are_in_it_but_no_line_of_a_log(run: Path, tmp_path: Path) -> None:
    (run / "trace").mkdir()
    head = {"t": 1.0, "process": "launcher", "role": "launcher", "host": "a", "pid": 1}
    died = {"t": 2.0, "event": "ended", "process": "generator-0", "code": 1}
    (run / "trace" / "launcher.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(died)}\n")
    (run / "logs").mkdir()
    (run / "logs" / "generator-0.log").write_text("asyncrl generator: no such file: /secret/place\n")
    write_report([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "generator-0 has died once." in page
    assert "/secret/place" not in page


def test_only_its_own_script_and_style_may_run(run: Path, tmp_path: Path) -> None:
    write_report([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for text, directive in ((script, "script-src"), (style, "style-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; img-src data:; style-src ")
    assert policy.endswith("; base-uri 'none'; form-action 'none'")
    assert "static/" not in page.replace(script, "")


def test_a_report_has_bounds(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of the newest rollouts, and lanes of each process up to so many."""
    (run / "images" / "b.png").write_bytes(b"another")
    rollout = {"version": 2, "ordinal": 4, "reward": 0.0, "images": ["images/b.png"]}
    with (run / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps(rollout) + "\n")
    (run / "trace").mkdir()
    for number in range(MOST_PROCESSES + 1):
        name, begun = f"generator-{number}", {"t": 1.0, "lane": "engine", "do": "compute"}
        head = {"t": 1.0, "process": name, "role": "generator", "host": "a", "pid": 1}
        lines = (head, begun, {"t": 2.0, "lane": "engine", "do": None})
        (run / "trace" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(report, "MOST_PICTURES", 1)
    (data,) = embedded(report.report([PageData(run)]))
    assert [*data["images"]] == ["images/b.png"]
    assert len(data["lanes"]["lanes"]) == MOST_PROCESSES + 1
    monkeypatch.setattr(report, "ROLES_OPENED", MOST_PROCESSES)
    (data,) = embedded(report.report([PageData(run)]))
    assert [lane["group"] for lane in data["lanes"]["lanes"]] == [MOST_PROCESSES + 1]


def test_the_command_writes_where_it_was_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run), "--output", str(tmp_path / "there.html")]) == 0
    assert "there.html" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "nothing"), "--output", str(tmp_path / "no.html")]) == 2
    assert "is no folder" in capsys.readouterr().err
    assert not (tmp_path / "no.html").exists()
