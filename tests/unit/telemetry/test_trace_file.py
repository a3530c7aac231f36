"""The file of a trace: rotation while it is read, and disks that take no more."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import resource
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.telemetry import tracing
from asyncrl.telemetry.trace_file import TraceFile, TraceTail

MOST = 4000


def opened(folder: Path, most: int = MOST) -> TraceFile:
    return TraceFile(folder, "p", most, list)


def line(number: int) -> bytes:
    return b'{"t": %d, "padding": "%s"}\n' % (number, b"x" * 80)


def numbers(lines: bytes) -> list[int]:
    return [int(each.split(b",")[0][6:]) for each in lines.splitlines()]


@settings(deadline=None)
@given(bursts=st.lists(st.integers(0, 40), max_size=30))
def test_a_reader_gets_each_line_once_over_rotations_or_notices_that_some_are_gone(bursts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    file, tail, written, got = opened(folder), TraceTail(folder / "p.jsonl"), 0, []
    for burst in bursts:
        for _ in range(burst):
            file.append(line(written))
            written += 1
        while lines := tail.read(700):
            got += numbers(lines)
    file.close()
    assert got == sorted(set(got))
    lost = written - len(got)
    lost_since = lost - (got[0] if got else 0)  # what was removed before the first look is nobody's
    assert tail.missed or not lost_since
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST
    if max(bursts, default=0) * len(line(10)) <= MOST // 2:
        assert not lost


def test_a_reader_that_comes_late_begins_with_what_is_left(tmp_path):
    file = opened(tmp_path)
    for number in range(60):
        file.append(line(number))
    tail = TraceTail(tmp_path / "p.jsonl")
    got = []
    while lines := tail.read():
        got += numbers(lines)
    assert got == list(range(got[0], 60))
    assert len(got) > 18
    assert tail.missed == 0


def test_half_a_line_is_left_until_it_is_whole_and_one_that_is_too_long_is_passed_over(tmp_path):
    path, tail = tmp_path / "p.jsonl", TraceTail(tmp_path / "p.jsonl")
    assert tail.read() == b""
    path.write_bytes(line(1)[:20])
    assert tail.read() == b""
    path.write_bytes(line(1) + line(2)[:50])
    assert tail.read() == line(1)
    with path.open("ab") as file:
        file.write(line(2)[50:] + b"y" * 1000 + b"\n" + line(3))
    got = b""
    while lines := tail.read(200):
        got += lines
    assert numbers(got.replace(b"y" * 1000 + b"\n", b"")) == [2, 3]


class FullDisk:
    """`os.write` of a disk with so many bytes of room."""

    def __init__(self, room: int) -> None:
        self.room, self.write = room, os.write

    def __call__(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(len(data), self.room)
        self.room -= taken
        return self.write(file, data[:taken])


@pytest.mark.parametrize("room", [0, 1, 500])
def test_a_full_disk_ends_the_trace_with_one_warning(room, tmp_path, monkeypatch, caplog):
    with tracing.recording(tmp_path, "p", "learner", 1):
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            patched.setattr(tracing.current()._file, "_system_write", FullDisk(room))
            for number in range(50):
                tracing.event("something", number=number)
        tracing.event("there is room again")
    assert [record.getMessage() for record in caplog.records] == [
        f"the trace {tmp_path / 'trace' / 'p.jsonl'} ends here: [Errno 28] No space left on device"
    ]
    assert b"again" not in (tmp_path / "trace" / "p.jsonl").read_bytes()


def test_half_a_row_ends_the_trace_also_if_there_is_room_again(tmp_path, caplog):
    cuts = [10, 10_000]
    file = TraceFile(tmp_path, "p", MOST, list, lambda opened, data: os.write(opened, data[: cuts.pop(0)]))
    file.append(line(1))
    file.append(line(2))
    assert file.ended
    assert (tmp_path / "p.jsonl").read_bytes() == line(1)[:10]
    assert len(caplog.records) == 1


def test_a_disk_that_is_full_at_a_new_file_ends_the_trace_too(tmp_path, monkeypatch, caplog):
    file = TraceFile(tmp_path, "p", 400, lambda: [line(0)])
    file.append(line(1))
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest: real("/nowhere/at/all" if "p.jsonl" in str(path) else path, *rest)
    )
    file.append(line(2))
    file.append(line(3))
    assert file.ended
    assert len(caplog.records) == 1


def _with_little_room(folder: str, most: int, role: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    with tracing.recording(Path(folder), "p", role, 1):
        for number in range(1000):
            tracing.event("something", number=number)


@pytest.mark.parametrize("role", ["learner", "queue"])
def test_a_process_that_the_system_lets_write_no_more_goes_on_without_its_trace(role, tmp_path):
    """A real error of the system, in the middle of a line, by either way of writing."""
    child = multiprocessing.get_context("fork").Process(
        target=_with_little_room, args=(str(tmp_path), 2000, role)
    )
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert (tmp_path / "trace" / "p.jsonl").stat().st_size == 2000


def test_a_value_that_json_does_not_have_costs_its_row_alone(tmp_path):
    class Odd:
        def __str__(self) -> str:
            return "odd"

    with tracing.recording(tmp_path, "p", "learner", 1):
        tracing.event("text", value=Odd())
        tracing.event("half a pair", value="\ud800")
        tracing.event("after")
    text = (tmp_path / "trace" / "p.jsonl").read_text()
    assert '"value":"odd"' in text
    assert '"event":"unwritable","why":"UnicodeEncodeError"' in text
    assert '"event":"after"' in text


def test_a_row_gives_the_interpreter_to_no_other_thread(tmp_path):
    """Which would have a turn as soon as it can."""
    turns, watched, over = [0], threading.Event(), threading.Event()

    def compute() -> None:
        watched.wait()
        if not over.is_set():
            turns[0] += 1

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=compute, daemon=True)
    with tracing.recording(tmp_path, "p", "learner", 1):
        thread.start()
        sys.setswitchinterval(
            5.0
        )  # from now on a thread is left in peace, unless it gives the interpreter away
        try:
            watched.set()
            for number in range(3000):
                tracing.event("something", number=number)
            turns_meanwhile = turns[0]
        finally:
            sys.setswitchinterval(interval)
            over.set()
        thread.join(30)
    assert turns_meanwhile == 0
