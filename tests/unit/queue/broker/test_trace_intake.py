"""Rows of processes elsewhere, at the queue: where they go, and what a stranger cannot do with them."""

from __future__ import annotations

import os
import shutil
import threading
from collections import namedtuple

import pytest

from asyncrl.errors import RefusedError, WireError
from asyncrl.observability.timeline import Timeline
from asyncrl.queue.broker import trace_intake
from asyncrl.queue.broker.trace_intake import BUFFER_BYTES, MARK, TraceIntake
from asyncrl.queue.client import trace_link
from asyncrl.telemetry.trace_file import TraceFile

MB = 1_000_000
HEAD = b'{"t":1.0,"process":"generator-0","role":"generator","host":"elsewhere","pid":7}\n'
CLOCK = b'{"t":1.5,"clock":[%d.0,0.1]}\n'
EVENT = b'{"t":%d,"event":"something that has happened","number":%d}\n'


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "trace").mkdir()
    return tmp_path / "trace"


def test_rows_become_the_file_of_their_process(folder):
    intake = TraceIntake(folder, MB)
    assert intake.take("generator-0", HEAD + EVENT % (2, 1))
    assert intake.take("generator-0", EVENT % (3, 2))
    assert intake.take("learner-rank-1", EVENT % (3, 3))
    intake.close()
    timeline = Timeline(folder.parent)
    timeline.read()
    process = timeline.processes["generator-0"]
    assert (process.role, process.host) == ("generator", "elsewhere")
    assert [event.about["number"] for event in process.events] == [1, 2]
    assert set(timeline.processes) == {"generator-0", "learner-rank-1"}


@pytest.mark.parametrize(
    "name",
    [
        "../x", "a/b", "/tmp/x", "", ".", "..", ".hidden", "a\0b", "a b", "é", "x" * 200, "p.earlier",
        "queue", "launcher",
    ],
)  # fmt: skip
def test_a_name_that_is_none_of_a_process_elsewhere_is_refused(name, folder):
    intake = TraceIntake(folder, MB)
    before = sorted(os.walk(folder.parent))
    with pytest.raises(WireError):
        intake.take(name, HEAD)
    intake.close()
    assert [files for *_, files in before] == [[], [intake.mark]]
    assert [files for *_, files in sorted(os.walk(folder.parent))] == [[], []]


def test_half_a_line_is_refused(folder):
    intake = TraceIntake(folder, MB)
    with pytest.raises(WireError, match="lines"):
        intake.take("generator-0", HEAD[:-1])
    intake.close()


def test_the_files_of_a_process_are_bounded_and_each_says_whose_it_is(folder):
    intake = TraceIntake(folder, 100_000)
    assert intake.take("generator-0", HEAD + CLOCK % 2 + CLOCK % 3)
    assert intake.take("generator-0", b'{"t":1.6,"event":"ended","process":"another"}\n')
    for number in range(300):
        rows = b"".join(EVENT % (2 + number, number * 20 + i) for i in range(20))
        while not intake.take("generator-0", rows):
            pass
    intake.close()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 100_000
    timeline = Timeline(folder.parent)
    timeline.read()
    process = timeline.processes["generator-0"]
    assert (process.role, process.offset_s, process.damaged) == ("generator", 3.0, 0)
    numbers = [event.about["number"] for event in process.events]
    assert numbers == list(range(numbers[0], 6000))


def test_more_processes_than_a_run_has_are_refused(folder, monkeypatch):
    monkeypatch.setattr(trace_intake, "MOST_PROCESSES", 2)
    intake = TraceIntake(folder, MB)
    assert intake.take("a", HEAD)
    assert intake.take("b", HEAD)
    with pytest.raises(RefusedError, match="full"):
        intake.take("c", HEAD)
    assert intake.take("a", HEAD)
    intake.close()


def test_a_disk_that_is_nearly_full_is_left_to_the_run(folder, monkeypatch, caplog):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 1 << 20))
    intake = TraceIntake(folder, MB)
    assert intake.take("generator-0", HEAD)
    assert intake.take("generator-0", HEAD)
    intake.close()
    assert list(folder.iterdir()) == []
    assert len(caplog.records) == 1


def test_the_broker_never_waits_for_a_disk_that_hangs(folder, monkeypatch):
    """Rows that find no room are left to their sender."""
    hanging, append = threading.Event(), TraceFile.append
    monkeypatch.setattr(TraceFile, "append", lambda file, line: hanging.wait(30) and append(file, line))
    intake = TraceIntake(folder, 100 * MB)
    rows = EVENT % (1, 1) * 1000
    taken = 0
    while taken < 2 * BUFFER_BYTES // len(rows) and intake.take("generator-0", rows):
        taken += 1
    assert taken == BUFFER_BYTES // len(rows)
    hanging.set()
    intake.close()
    assert (folder / "generator-0.jsonl").stat().st_size == taken * len(rows)


def test_there_is_room_again_once_rows_are_written(folder, monkeypatch):
    monkeypatch.setattr(trace_intake, "BUFFER_BYTES", len(HEAD))
    intake = TraceIntake(folder, MB)
    assert intake.take("generator-0", HEAD)
    intake.close()  # all that was taken is written then
    assert (folder / "generator-0.jsonl").read_bytes() == HEAD
    assert intake.take("generator-0", HEAD)
    assert not intake.take("generator-0", HEAD)


def test_the_end_of_the_queue_does_not_wait_for_a_disk_that_hangs(folder, monkeypatch):
    """It would hang here."""
    hanging = threading.Event()
    monkeypatch.setattr(trace_intake, "CLOSE_S", 0.01)
    monkeypatch.setattr(TraceFile, "append", lambda file, line: hanging.wait())
    intake = TraceIntake(folder, MB)
    intake.take("generator-0", HEAD)
    intake.close()
    assert intake._thread.is_alive()
    hanging.set()
    intake._thread.join()


def test_each_queue_has_a_mark_of_its_own_which_goes_with_it(folder):
    first = TraceIntake(folder, MB)
    (folder / "queue-mine.jsonl").touch()
    second = TraceIntake(folder, MB)  # the first one was killed
    assert {path.name for path in folder.iterdir()} == {second.mark, "queue-mine.jsonl"}
    assert first.mark != second.mark
    assert MARK.fullmatch(second.mark)
    assert trace_link.MARK.fullmatch(second.mark)
    second.close()
    assert {path.name for path in folder.iterdir()} == {"queue-mine.jsonl"}
    first.close()
