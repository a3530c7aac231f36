from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.observability.rows import STEP_S, MetricRows, NewestRows, RowTail, number, series


def append(path: Path, *rows: dict[str, Any]) -> None:
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


def test_versions_and_evaluations_are_apart_and_in_order(metrics: Path, tmp_path: Path) -> None:
    rows = MetricRows(tmp_path)
    assert not rows.read()
    append(metrics, {"version": 1, STEP_S: 0.5}, {"version": 2, STEP_S: 0.25})
    append(metrics, {"version": 1, "eval/accuracy": 0.5}, {"version": 3, STEP_S: 1.0})
    append(metrics, {"version": 0, "eval/accuracy": 0.125})
    assert rows.read()
    assert [row["version"] for row in rows.versions] == [1, 2, 3]
    assert series(rows.evaluations, "eval/accuracy") == [(0, 0.125), (1, 0.5)]


def test_a_resumed_run_replaces_rows(metrics: Path, tmp_path: Path) -> None:
    rows = MetricRows(tmp_path)
    append(metrics, {"version": 1, "a": 1}, {"version": 2, "a": 2}, {"version": 3, "a": 3})
    rows.read()
    append(tmp_path / "cut", {"version": 1, "a": 1})
    os.replace(tmp_path / "cut", metrics)
    append(metrics, {"version": 2, "a": 20})
    assert rows.read()
    assert series(rows.versions, "a") == [(1, 1), (2, 20)]
    append(metrics, {"version": 2, "a": 30})  # a learner that was killed before its checkpoint
    rows.read()
    assert series(rows.versions, "a") == [(1, 1), (2, 30)]


def test_old_rows_are_thinned_out_and_new_ones_kept(metrics: Path, tmp_path: Path) -> None:
    rows = MetricRows(tmp_path)
    append(metrics, *[{"version": version} for version in range(1, 9)])
    rows.read()
    rows.thin(8)
    assert len(rows.versions) == 8
    rows.thin(7)
    assert [row["version"] for row in rows.versions] == [1, 3, 5, 6, 7, 8]
    append(metrics, {"version": 4}, {"version": 9})
    rows.read()
    assert [row["version"] for row in rows.versions] == [1, 3, 4, 5, 6, 7, 8, 9]


def test_damaged_lines_are_counted(metrics: Path, tmp_path: Path) -> None:
    rows = MetricRows(tmp_path)
    append(metrics, {"version": 1})
    with metrics.open("ab") as file:
        file.write(b'\xff\x00\n[1]\n{"version": 2}\n{"version"')
    rows.read()
    assert [row["version"] for row in rows.versions] == [1, 2]
    assert rows.damaged == 2


@given(st.lists(st.integers(0, 30), min_size=1))
def test_rows_are_in_order_of_versions_however_they_come(versions: list[int]) -> None:
    rows = MetricRows(Path("/nowhere"))
    rows._tail.new_rows = lambda: [{"version": one, "at": at} for at, one in enumerate(versions)]  # type: ignore[method-assign]
    rows.read()
    last = {one: at for at, one in enumerate(versions)}
    assert series(rows.versions, "at") == sorted(last.items())


def test_what_is_no_finite_number_is_none() -> None:
    row = {"a": None, "b": float("nan"), "c": True, "d": "1", "e": 2}
    assert [number(row, key) for key in "abcdef"] == [None, None, None, None, 2.0, None]


@pytest.mark.parametrize(
    "line",
    [b"[" * 100_000, b'{"version": 2, "a": ' + b"[" * 100_000, b'{"version": 2, "a": "\\ud800"}', b"\xff"],
)
def test_a_line_that_is_no_row_is_counted(metrics: Path, line: bytes) -> None:
    metrics.write_bytes(line + b'\n{"version": 3}\n')
    tail = RowTail(metrics)
    assert tail.new_rows() == [{"version": 3}]
    assert tail.damaged == 1


def test_what_is_no_file_has_no_rows_and_one_warning(metrics: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(metrics)
    tail = RowTail(metrics)
    assert tail.new_rows() == tail.new_rows() == []
    assert caplog.text.count("metrics.jsonl is not read") == 1


def test_a_long_file_is_read_in_pieces(metrics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.observability.rows.PIECE", 64)
    append(metrics, *({"version": version, "text": "x" * 20} for version in range(9)))
    append(metrics, {"version": 9, "text": "x" * 200}, {"version": 10, "text": ""})
    tail = RowTail(metrics)
    assert [row["version"] for row in tail.new_rows()] == [*range(9), 10]
    assert tail.damaged > 0


def test_huge_numbers_can_be_added_up() -> None:
    rows = [{"version": at, "a": value} for at, value in enumerate((10**400, 1.7e308, -1.7e308, 1.7e308))]
    assert [value for _, value in series(rows, "a")] == [1e100, 1e100, -1e100, 1e100]


def test_the_newest_rows_are_kept_within_bounds() -> None:
    rows = NewestRows(3, 100)
    for at in range(4):
        rows.append({"n": at}, 10)
    assert [row["n"] for row in rows] == [1, 2, 3]
    rows.append({"n": 4}, 85)
    assert [row["n"] for row in rows] == [3, 4]
    assert [*rows.newest()] == [({"n": 4}, 85), ({"n": 3}, 10)]
    rows.append({"n": 5}, 101)
    assert len(rows) == 0
