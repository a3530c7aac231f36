"""Files of metrics hold numbers that every reader of JSON takes."""

from __future__ import annotations

import json
import math
from pathlib import Path

from asyncrl.learner.reporting.report import SUMMARY, write_summary
from asyncrl.telemetry.sinks import JsonlSink


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write({"reward/mean": math.inf, "loss": math.nan, "version": 1})
    sink.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (row["reward/mean"], row["loss"], row["version"]) == (None, None, 1)
    write_summary(tmp_path, {"reward_end": -math.inf, "staleness": {"max": 2}})
    summary = json.loads((tmp_path / SUMMARY).read_text(), parse_constant=refuse)
    assert summary == {"reward_end": None, "staleness": {"max": 2}}
