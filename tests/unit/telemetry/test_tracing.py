"""The trace of a process, as it is written and read back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from asyncrl.observability.timeline import Timeline
from asyncrl.telemetry import tracing
from asyncrl.telemetry.spans import Spans


def rows(folder: Path, process: str = "p") -> list[dict]:
    return [
        msgspec.json.decode(line)
        for line in (folder / "trace" / f"{process}.jsonl").read_bytes().splitlines()
    ]


def test_a_loop_becomes_a_lane_and_work_beside_it_spans(tmp_path):
    with tracing.recording(tmp_path, "p", "generator", 1):
        spans = Spans("engine")
        with spans("compute"), spans("wait/weights"), tracing.span("weights", "fetch", version=3) as at_end:
            at_end["bytes"] = 8
        tracing.event("flip", version=3)
        tracing.sample({"queue/ready": 2})
    timeline = Timeline(tmp_path)
    assert timeline.read()
    process = timeline.processes["p"]
    assert process.role == "generator"
    assert [span.name for span in process.lanes["engine"].spans] == ["compute", "wait/weights", "compute"]
    (fetch,) = process.lanes["weights"].spans
    assert fetch.about == {"version": 3, "bytes": 8}
    waiting = process.lanes["engine"].spans[1]
    assert waiting.start <= fetch.start <= fetch.end <= waiting.end
    assert [(event.name, event.about) for event in process.events] == [("flip", {"version": 3})]
    assert process.figures["queue/ready"][1] == [2]
    assert not timeline.read()


def test_a_killed_process_loses_no_row(tmp_path):
    child = os.fork()
    if child == 0:
        with tracing.recording(tmp_path, "p", "learner", 1):
            tracing.event("before")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [row["event"] for row in rows(tmp_path) if "event" in row] == ["before"]


def test_a_process_that_begins_again_goes_on_in_the_file_behind_a_damaged_line(tmp_path):
    with tracing.recording(tmp_path, "p", "learner", 1):
        tracing.event("first")
    path = tmp_path / "trace" / "p.jsonl"
    with path.open("ab") as file:
        file.write(b'{"t": 12.5, "eve')
    with tracing.recording(tmp_path, "p", "learner", 1):
        tracing.event("second")
    timeline = Timeline(tmp_path)
    timeline.read()
    process = timeline.processes["p"]
    assert [event.name for event in process.events] == ["first", "began again", "second"]
    assert process.damaged == 1


def test_the_oldest_part_is_removed_and_lanes_go_on(tmp_path):
    with tracing.recording(tmp_path, "p", "learner", 1):
        with Spans("learner")("compute"):
            for _ in range(12_000):
                tracing.event("something that has happened", version=1)
        files = list((tmp_path / "trace").iterdir())
        assert len(files) == 2
        assert sum(file.stat().st_size for file in files) <= 1_000_000
    assert rows(tmp_path)[0]["process"] == "p"
    assert {"lane": "learner", "do": "compute"}.items() <= rows(tmp_path)[1].items()


def test_nothing_is_written_without_a_trace_or_in_a_forked_child(tmp_path):
    tracing.event("nowhere")
    with tracing.recording(tmp_path, "off", "learner", 0):
        tracing.event("nowhere")
    assert not (tmp_path / "trace").exists()
    with tracing.recording(tmp_path, "p", "learner", 1):
        child = os.fork()
        if child == 0:
            tracing.event("child")
            os._exit(0)
        os.waitpid(child, 0)
    assert "child" not in str(rows(tmp_path))


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], tracing.Trace]:
    """The trace of a process, at a moment that the test chooses."""
    trace = tracing.Trace(tmp_path / "trace", "p", "learner", 1_000_000)

    def moved(moment: float) -> tracing.Trace:
        monkeypatch.setattr(trace, "now", lambda: moment)
        return trace

    return moved


def test_a_pause_is_written_from_its_beginning_once_it_has_become_long(at, tmp_path):
    lane = tracing.LoopLane("engine")
    at(10.0).switch(lane, "compute")
    at(11.0).switch(lane, tracing.OTHER)
    at(11.0009).switch(lane, "wait")  # too short a pause
    at(12.0).switch(lane, tracing.OTHER)
    at(13.0).switch(lane, tracing.OTHER)
    at(13.5).tick()
    assert rows(tmp_path)[-2]["do"] == "other"  # while it lasts
    at(14.0).switch(lane, "compute")
    at(15.0).switch(lane, tracing.OTHER)
    at(15.5).switch(lane, "compute")
    at(16.0).close()
    assert [(row["t"], row["do"]) for row in rows(tmp_path) if "do" in row] == [
        (10.0, "compute"),
        (11.0009, "wait"),
        (12.0, "other"),
        (14.0, "compute"),
        (15.0, "other"),
        (15.5, "compute"),
        (16.0, None),
    ]


def test_a_short_span_is_left_out_and_one_that_lasts_has_a_row_at_either_end(at, tmp_path):
    short, written, lasting = (at(20.0).begin("rewards", "score", {"of": each}) for each in "abc")
    at(20.25).end(short, 0.5, {})
    at(20.75).end(written, 0.5, {"late": True})
    at(21.0).tick()
    at(22.0).tick()
    at(23.0).end(lasting, 0.5, {})
    score = {"lane": "rewards", "do": "score"}
    assert rows(tmp_path)[1:] == [
        {"t": 20.75, "took": 0.75, **score, "of": "b", "late": True},
        {"t": 20.0, "begin": lasting, **score, "of": "c"},
        {"t": 21.0},
        {"t": 22.0},
        {"t": 23.0, "end": lasting},
    ]
