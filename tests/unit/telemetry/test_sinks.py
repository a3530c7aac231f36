"""Files of metrics hold numbers that every reader of JSON takes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.learner.reporting.report import SUMMARY, write_summary
from asyncrl.telemetry.sinks import JsonlSink, read_rows


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write({"rollout/reward/mean": math.inf, "loss": math.nan, "version": 1})
    sink.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (row["rollout/reward/mean"], row["loss"], row["version"]) == (None, None, 1)
    write_summary(tmp_path, {"reward_end": -math.inf, "staleness": {"max": 2}})
    summary = json.loads((tmp_path / SUMMARY).read_text(), parse_constant=refuse)
    assert summary == {"reward_end": None, "staleness": {"max": 2}}


@pytest.mark.parametrize("last", [b"{}garbage\n", b"[1]\n", b"\0\0\n", b"\xff\n", b'{"half": '])
def test_a_damaged_last_row_is_left_out(tmp_path: Path, last: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"version": 1}\n' + last)
    assert list(read_rows(path)) == [{"version": 1}]


def test_a_damaged_row_before_the_last_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('garbage\n{"version": 1}\n')
    with pytest.raises(ConfigError, match=rf"^line = '{path}:1': is no JSON object"):
        list(read_rows(path))


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint_and_a_new_one_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for resume_at, kept in ((None, [3]), (2, [1, 2, 3]), (0, [3])):
        path.write_text("".join(f'{{"version": {version}}}\n' for version in (1, 2, 3, 4)))
        sink = JsonlSink(path, resume_at)
        sink.write({"version": 3})
        sink.close()
        assert [row["version"] for row in read_rows(path)] == kept
