"""docs/tutorial.md, followed from an empty folder on, with few versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages import follow


@pytest.mark.slow
def test_every_block_of_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = follow("docs/tutorial.md", {"versions: 60": "versions: 3"})
    runs = tmp_path / "tutorial/runs"
    summaries = {path.parent.name: json.loads(path.read_text()) for path in runs.glob("*/summary.json")}
    assert {name: summary["versions"] for name, summary in summaries.items()} == {
        "first": 3,
        "synchronous": 3,
        "rloo": 3,
    }
    assert summaries["synchronous"]["staleness"]["max"] == 0
    (table,) = (text for text in printed if text.startswith("1 "))
    assert [line.split()[0] for line in table.splitlines()] == ["1", "2", "3"]
