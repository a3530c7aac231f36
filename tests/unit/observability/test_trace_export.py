"""The exported trace is one that the Trace Event Format allows, whatever the rows, and has all that they have."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.observability import trace_export
from asyncrl.observability.trace_export import write_trace

NEEDED = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "ts", "pid", "tid", "s", "args"},
    "C": {"name", "ts", "pid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}
"""Keys of each phase, by the "Trace Event Format" of the Chromium project."""

Row = dict[str, Any]


def check(rows: list[Row]) -> None:
    """Raise for what a reader of the format would refuse, or draw wrongly."""
    spans, named, arrows = defaultdict(list), {}, defaultdict(list)
    for row in rows:
        assert row.keys() - {"ph"} - {"tid"} == NEEDED[row["ph"]] - {"tid"}
        assert "tid" in row or row["ph"] in "MC"
        assert all(isinstance(row.get(key, 0), int) for key in ("ts", "dur", "pid", "tid"))
        assert row.get("dur", 0) >= 0
        if row["ph"] == "X":
            spans[row["pid"], row["tid"]].append((row["ts"], row["ts"] + row["dur"]))
        if row["name"] == "thread_name":
            assert named.setdefault((row["pid"], row["tid"]), row["args"]["name"]) == row["args"]["name"]
        if row["ph"] == "C":
            assert all(math.isfinite(value) for value in row["args"].values())
        if row["ph"] in "sf":
            arrows[row["id"]].append(row)
    assert spans.keys() <= named.keys()
    assert len({tid for _, tid in named}) == len(named)
    for thread in spans.values():
        ends = [end for _, end in sorted(thread)]
        assert all(begin >= end for end, (begin, _) in zip(ends, sorted(thread)[1:], strict=False))
    for begin, end in arrows.values():
        assert (begin["ph"], end["ph"]) == ("s", "f")
        assert (begin["name"], begin["cat"]) == (end["name"], end["cat"])
        assert begin["ts"] <= end["ts"]


def exported(tmp_path: Path, traces: dict[str, list[Row]], name: str = "t.json") -> list[Row]:
    (tmp_path / "trace").mkdir(exist_ok=True)
    for process, rows in traces.items():
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        (tmp_path / "trace" / f"{process}.jsonl").write_bytes(lines)
    size = write_trace(tmp_path, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert size == len(data)
    parsed = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    check(parsed["traceEvents"])
    return parsed["traceEvents"]


LEARNER = [
    {"t": 1.0, "process": "learner", "role": "learner", "host": "a", "pid": 1},
    {"t": 2.0, "took": 0.5, "lane": "weights", "do": "snapshot", "version": 1},
    {"t": 2.0, "lane": "learner", "do": "wait/groups"},
    {"t": 6.0, "event": "claim", "version": 1, "groups": 1, "tasks": [7]},
    {"t": 7.0, "lane": "learner", "do": None},
]
GENERATOR = [
    {"t": 0.5, "process": "g", "role": "generator", "host": "b", "pid": 2},
    {"t": 0.6, "values": {"sync/held": 0, "odd": None}},
    {"t": 1.0, "clock": [1.0, 0.001]},
    {"t": 2.5, "took": 1.0, "lane": "weights", "do": "flip", "version": 1},
    {"t": 4.0, "took": 1.0, "lane": "rollouts", "do": "generate", "task": 7, "version": 1},
    {"t": 4.5, "took": 1.0, "lane": "rollouts", "do": "generate", "task": 8, "version": 1},
    {"t": 4.6, "begin": 1, "lane": "rollouts", "do": "generate", "task": 9},
    {"t": 5.0},
]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_processes_lanes_events_figures_and_arrows(tmp_path: Path, name: str) -> None:
    rows = exported(tmp_path, {"g": GENERATOR, "learner": LEARNER}, name)
    processes = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert processes == {1: "learner", 2: "g"}
    threads = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert sorted(threads.values()) == [
        "events",
        "events",
        "learner",
        "rollouts",
        "rollouts 2",
        "weights",
        "weights",
    ]
    spans = [
        (processes[row["pid"]], threads[row["tid"]], row["name"], row["ts"], row["dur"], row["args"])
        for row in rows
        if row["ph"] == "X"
    ]
    at = {"version": 1}
    assert spans == [
        ("learner", "weights", "snapshot", 1_500_000, 500_000, at),
        ("learner", "learner", "wait/groups", 2_000_000, 5_000_000, {}),
        ("g", "weights", "flip", 2_500_000, 1_000_000, at),
        ("g", "rollouts", "generate", 4_000_000, 1_000_000, at | {"task": 7}),
        ("g", "rollouts 2", "generate", 4_500_000, 1_000_000, at | {"task": 8}),
        ("g", "rollouts", "generate", 5_600_000, 400_000, {"task": 9}),
    ]
    (counter,) = [row for row in rows if row["ph"] == "C"]
    assert (counter["name"], counter["ts"], counter["args"]) == ("sync/held", 1_600_000, {"value": 0})
    (instant,) = [row for row in rows if row["ph"] == "i"]
    assert (instant["name"], instant["ts"], instant["s"]) == ("claim", 6_000_000, "p")
    arrows = [
        (row["ph"], row["name"], processes[row["pid"]], threads[row["tid"]], row["ts"])
        for row in rows
        if row["ph"] in "sf"
    ]
    assert arrows == [
        ("s", "weights", "learner", "weights", 1_500_000),
        ("f", "weights", "g", "weights", 2_500_000),
        ("s", "group", "g", "rollouts", 4_000_000),
        ("f", "group", "learner", "learner", 6_000_000),
    ]


def test_no_arrow_points_back_in_time(tmp_path: Path) -> None:
    """After a rewind a task is made again that was taken before, and a version is made live before its newest copy."""
    learner = [
        LEARNER[0],
        {"t": 5.0, "took": 0.5, "lane": "weights", "do": "snapshot", "version": 1},
        {"t": 5.5, "event": "claim", "version": 1, "groups": 1, "tasks": [7]},
    ]
    generator = [
        {**GENERATOR[0], "t": 3.0},
        {"t": 4.0, "took": 0.5, "lane": "weights", "do": "flip", "version": 1},
        {"t": 7.0, "took": 1.0, "lane": "rollouts", "do": "generate", "task": 7},
    ]
    rows = exported(tmp_path, {"g": generator, "learner": learner})
    assert [row for row in rows if row["ph"] in "sf"] == []


def test_rows_wait_for_the_clock_of_their_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early = [{"t": 0.5 + number / 100, "event": "early"} for number in range(20)]
    traces = {"g": [GENERATOR[0], *early, *GENERATOR[1:]]}
    whole = exported(tmp_path, traces)
    assert next(row["ts"] for row in whole if row["name"] == "early") == 1_500_000
    monkeypatch.setattr(trace_export, "FIRST", 120)  # less than two rows
    monkeypatch.setattr(trace_export, "PIECE", 120)
    pieces = exported(tmp_path, traces)
    assert sorted(map(str, pieces)) == sorted(map(str, whole))


times = st.integers(0, 40).map(lambda each: each / 4)
lanes = st.sampled_from(["rollouts", "weights"])
rows = st.one_of(
    st.fixed_dictionaries(
        {"t": times, "took": times, "lane": lanes, "do": st.just("generate"), "task": st.integers(0, 3)}
    ),
    st.fixed_dictionaries(
        {
            "t": times,
            "begin": st.integers(0, 3),
            "lane": lanes,
            "do": st.just("flip"),
            "version": times | st.lists(times, max_size=6),
        }
    ),
    st.fixed_dictionaries({"t": times, "end": st.integers(0, 3)}),
    st.fixed_dictionaries({"t": times, "lane": st.just("learner"), "do": st.sampled_from(["a", "b", None])}),
    st.fixed_dictionaries(
        {
            "t": times,
            "event": st.just("claim"),
            "tasks": st.lists(st.integers(0, 3) | st.just("none"), max_size=6) | st.none(),
        }
    ),
    st.fixed_dictionaries({"t": times, "values": st.dictionaries(lanes, st.floats() | st.none())}),
    st.fixed_dictionaries({"t": times, "clock": st.tuples(st.floats(0, 3), times)}),
    st.fixed_dictionaries(
        {"t": times, "process": st.just("p"), "role": st.sampled_from(["learner", "generator"])}
    ),
)


@settings(deadline=None)
@given(one=st.lists(rows, max_size=30), other=st.lists(rows, max_size=30), piece=st.integers(250, 2000))
def test_any_rows_in_any_pieces_make_the_same_valid_file(
    one: list[Row], other: list[Row], piece: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, traces = tmp_path_factory.mktemp("run"), {"a": one, "b": other}
    whole = exported(folder, traces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_export, "FIRST", piece)
        patch.setattr(trace_export, "PIECE", piece)
        pieces = exported(folder, traces)
    found = [
        sorted((row["ph"], row["name"], row["ts"], row.get("dur", 0)) for row in each if row["ph"] in "XiC")
        for each in (whole, pieces)
    ]
    assert found[0] == found[1]
