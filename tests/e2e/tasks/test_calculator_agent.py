"""The example of docs/agents.md: a model learns to call its tool, in the processes of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config.functions.function_spec import load_function

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_agent_learns_to_use_its_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    example = load_function("examples/calculator_agent.py:main", "example")
    summary = example([f"run.dir={tmp_path}", "run.versions=30"])
    start, end = summary["heldout_accuracy_start"], summary["heldout_accuracy_end"]
    assert start < 0.4
    assert end > start + 0.12
    rows = [json.loads(line) for line in (tmp_path / "calculator" / "metrics.jsonl").read_text().splitlines()]
    told = [row for row in rows if "agent/rollouts" in row][-1]
    assert told["agent/rollouts"] >= 30 * 16 * 8
    assert told["agent/turns"] > told["agent/rollouts"]
    assert told["agent/calls"] > told["agent/malformed"]
