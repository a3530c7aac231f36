"""Traces read back: any rows, torn anywhere, while they are written."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.observability.timeline import LONGEST, SILENT_S, ProcessTrace, Timeline
from asyncrl.telemetry import tracing
from asyncrl.telemetry.spans import Spans

times = st.floats(0, 100)
names = st.sampled_from(["engine", "weights", "compute", "other"])
about = st.dictionaries(st.sampled_from(["version", "bytes"]), st.integers(0, 9), max_size=2)


def row(**fields):
    return st.fixed_dictionaries({"t": times, **fields})


rows = st.one_of(
    row(process=names, role=names, pid=st.integers(1, 3)),
    row(process=names, continues=st.just(True)),
    row(lane=names, do=names | st.none()),
    row(lane=names, do=names, took=times, version=st.integers(0, 9)),
    row(lane=names, do=names, begin=st.integers(0, 3)),
    row(end=st.integers(0, 3), bytes=st.integers(0, 9)),
    row(event=names, process=names),
    row(values=st.dictionaries(names, st.floats(-9, 9) | st.none() | names)),
    row(clock=st.tuples(st.floats(-50, 50), times)),
    row(),
)
anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(["t", "process", "lane", "do", "took", "begin", "end", "event", "values", "clock"])
garbage = st.dictionaries(keys, anything | times, max_size=6)
encoded = (rows | garbage).map(msgspec.json.encode) | st.binary(max_size=40)


@settings(deadline=None)
@given(lines=st.lists(encoded, max_size=40), cuts=st.lists(st.integers(0, 4000), max_size=6))
def test_no_rows_are_too_odd_and_all_that_was_read_is_within_bounds(lines, cuts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "trace").mkdir()
    path, data = folder / "trace" / "p.jsonl", b"".join(line + b"\n" for line in lines)
    timeline = Timeline(folder)
    for cut in [*sorted(cuts), len(data)]:  # as it grows, torn anywhere
        path.write_bytes(data[:cut])
        timeline.read()
        begin, end = timeline.bounds()
        assert begin <= end
        for process in timeline.processes.values():
            for lane in process.lanes.values():
                for span in lane.spans:
                    if process.last:
                        assert begin <= span.start
                    assert span.start <= process.end_of(span, end)
                    assert math.isnan(span.end) or span.start <= span.end
                if lane.switches:
                    starts = [span.start for span in lane.spans if not math.isnan(span.end)]
                    assert len(starts) >= len(lane.spans) - len(process._open) - 1
            for noted, values in process.figures.values():
                assert len(noted) == len(values)
    whole = Timeline(folder)
    whole.read()
    assert repr(whole.processes.get("p") and whole.processes["p"].lanes) == repr(
        timeline.processes.get("p") and timeline.processes["p"].lanes
    )


def test_rows_are_read_while_their_files_are_replaced(tmp_path):
    """In a process of its own, which writes without a pause."""
    child = os.fork()
    if child == 0:
        with tracing.recording(tmp_path, "p", "learner", 1):
            for number in range(30_000):
                tracing.event("something that has happened", number=number)
        os._exit(0)
    timeline = Timeline(tmp_path)
    while not os.waitpid(child, os.WNOHANG)[0]:
        timeline.read()
    timeline.read()
    process = timeline.processes["p"]
    seen = [event.about["number"] for event in process.events]
    assert process.damaged == 0
    assert seen == sorted(set(seen))
    assert seen[-1] == 29_999
    if not process._tail.missed:
        assert seen == list(range(seen[0], 30_000))


@pytest.mark.parametrize("count", [14, 30])
def test_the_oldest_spans_are_forgotten_in_each_process_where_a_run_has_too_many(
    count, tmp_path, monkeypatch
):
    monkeypatch.setattr("asyncrl.observability.timeline.MOST_SPANS", 20)
    timeline = Timeline(tmp_path)
    with tracing.recording(tmp_path, "short", "generator", 1):
        tracing.begin("engine", "compute", at=0).end()
    with tracing.recording(tmp_path, "long", "generator", 1):
        for number in range(count):
            tracing.begin("engine", "compute", at=number).end()
            timeline.read()
        tracing.set_clock(1000.0, 1e-4)  # later than some have been forgotten
    timeline.read()
    kept = {name: trace.lanes["engine"].spans for name, trace in timeline.processes.items()}
    assert [span.about["at"] for span in kept["short"]] == [0]
    assert 5 <= len(kept["long"]) <= 10
    assert [span.about["at"] for span in kept["long"]] == [*range(count - len(kept["long"]), count)]
    assert all(span.start > kept["short"][0].start + 900 for span in kept["long"])


def test_a_clock_that_is_wrong_is_put_right_for_all_rows_of_its_process(tmp_path):
    """Also for those before its offset was known, but not for a process of the same name before."""
    early = 1000.0
    with tracing.recording(tmp_path, "p", "generator", 1):
        tracing.event("of the one before")
    with tracing.recording(tmp_path, "q", "queue", 1):
        before = tracing.now()
        with tracing.recording(tmp_path, "p", "generator", 1, wall=lambda: time.time() - early):
            with Spans("engine")("compute"), tracing.span("weights", "fetch"):
                tracing.event("before")
                tracing.sample({"queue/ready": 1})
            tracing.set_clock(early, 0.001)
            tracing.event("after")
            with tracing.span("weights", "flip"):
                pass
        after = tracing.now()
    timeline = Timeline(tmp_path)
    timeline.read()
    process = timeline.processes["p"]
    moments = [event.time for event in process.events[1:]] + process.figures["queue/ready"][0]
    for lane in process.lanes.values():
        moments += [moment for span in lane.spans for moment in (span.start, span.end)]
    assert [event.name for event in process.events] == [
        "of the one before",
        "began again",
        "before",
        "after",
    ]
    assert len(moments) >= 8
    assert all(before - 0.01 <= moment <= after + 0.01 for moment in moments)
    assert process.events[0].time <= before
    assert (process.offset_s, process.offset_error_s) == (early, 0.001)


def test_an_event_about_a_process_is_no_beginning_of_one(tmp_path):
    with tracing.recording(tmp_path, "launcher", "launcher", 1):
        tracing.event("ended", process="generator-0", code=1)
    timeline = Timeline(tmp_path)
    timeline.read()
    (event,) = timeline.processes["launcher"].events
    assert (event.name, event.about) == ("ended", {"process": "generator-0", "code": 1})
    assert timeline.processes["launcher"].role == "launcher"


def test_a_span_that_is_open_lasts_until_now_or_until_its_process_was_last_alive(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(
        b'{"t":100,"process":"p","role":"learner","host":"a","pid":1,"padding":"xxxxxxxxxxxxxxxx"}\n'
        b'{"t":101,"lane":"weights","do":"fetch","begin":1}\n{"t":105}\n'
    )
    trace = ProcessTrace(tmp_path / "p.jsonl")
    trace.read()
    (span,) = trace.lanes["weights"].spans
    assert trace.end_of(span, 106.0) == 106.0
    assert trace.end_of(span, 105.0 + SILENT_S + 1) == 105.0


@pytest.mark.parametrize("seen_before", [True, False])
def test_lanes_and_clock_go_on_in_a_further_file(seen_before, tmp_path):
    timeline = Timeline(tmp_path)
    with tracing.recording(tmp_path, "p", "learner", 1):
        tracing.set_clock(5.0, 0.1)
        with Spans("learner")("compute"):
            for _ in range(25_000 if not seen_before else 9_000):
                tracing.event("something that has happened", version=1)
            if seen_before:
                timeline.read()
            for _ in range(5_000):
                tracing.event("something that has happened", version=2)
            timeline.read()
            process = timeline.processes["p"]
            assert process.offset_s == 5.0
            assert [span.name for span in process.lanes["learner"].spans] == ["compute"]
            assert "began again" not in {event.name for event in process.events}


HEAD = b'{"t":%d,"process":"p","role":"learner","host":"a","pid":%d}\n'


def read_from(folder, *lines: bytes) -> ProcessTrace:
    (folder / "p.jsonl").write_bytes(b"".join(lines))
    trace = ProcessTrace(folder / "p.jsonl")
    trace.read()
    return trace


def test_the_bounds_of_a_process_move_with_its_clock(tmp_path):
    trace = read_from(tmp_path, HEAD % (100, 1), b'{"t":101,"event":"e"}\n{"t":102,"clock":[50.0,0.1]}\n')
    assert (trace.first, trace.last) == (150.0, 152.0)


def test_what_is_kept_of_a_process_whose_clock_is_not_known_yet_moves_with_it(tmp_path):
    """Though readers forget what was long ago."""
    trace = read_from(tmp_path, HEAD % (5000, 1), b'{"t":5001,"event":"e"}\n')
    trace.forget(1000.0)
    with (tmp_path / "p.jsonl").open("ab") as file:
        file.write(b'{"t":5002,"clock":[-3000.0,0.1]}\n')
    trace.read()
    assert [event.time for event in trace.events] == [2001.0]


def test_a_process_that_begins_again_ends_what_the_killed_one_had_open(tmp_path):
    """At its last row, also where the clock has gone back since."""
    open_spans = (
        b'{"t":101,"lane":"weights","do":"fetch","begin":1}\n{"t":102,"lane":"learner","do":"compute"}\n'
    )
    for again, noted in ((200, 200.0), (50, 105.0)):
        trace = read_from(tmp_path, HEAD % (100, 1), open_spans, b'{"t":105}\n', HEAD % (again, 2))
        ends = {name: lane.spans[-1].end for name, lane in trace.lanes.items()}
        assert ends == {"weights": 105.0, "learner": 105.0}
        assert [(event.name, event.time) for event in trace.events] == [("began again", noted)]


def test_a_clock_moves_the_spans_of_its_own_process_where_those_of_the_one_before_were_forgotten(tmp_path):
    span = b'{"t":%d,"took":1.0,"lane":"weights","do":"fetch"}\n'
    spans = [b"".join(span % (begun + at) for at in range(4)) for begun in (101, 201)]
    trace = read_from(tmp_path, HEAD % (100, 1), spans[0], HEAD % (200, 2), spans[1])
    trace.keep(7)
    with (tmp_path / "p.jsonl").open("ab") as file:
        file.write(b'{"t":205,"clock":[50.0,0.1]}\n')
    trace.read()
    assert [span.start for span in trace.lanes["weights"].spans] == [250.0, 251.0, 252.0, 253.0]


def test_a_figure_without_measure_a_long_row_and_a_pipe_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    folder.mkdir()
    long = b'{"t": 1, "event": "' + b"x" * LONGEST + b'"}'
    huge = b'{"t": 1, "values": {"a": ' + b"9" * 400 + b', "b": 1}}'
    (folder / "generator-0.jsonl").write_bytes(b"\n".join([long, huge, b'{"t": 2, "event": "x"}', b""]))
    os.mkfifo(folder / "generator-1.jsonl")
    (folder / "generator-2.jsonl").mkdir()
    (folder / os.fsdecode(b"g\xff.jsonl")).write_bytes(b'{"t": 2}\n')
    timeline = Timeline(tmp_path)
    assert timeline.read()
    assert "g?" in timeline.processes
    process = timeline.processes["generator-0"]
    assert process.damaged == 1
    assert [event.name for event in process.events] == ["x"]
    assert process.figures == {"b": ([1.0], [1])}
