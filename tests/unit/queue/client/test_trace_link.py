"""The trace of a process and the queue, in one event loop: clocks, and rows on their way."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from local_queue import LocalQueue

from asyncrl.errors import AsyncRLError
from asyncrl.observability.timeline import Timeline
from asyncrl.queue.broker.queue_state import QueueState
from asyncrl.queue.broker.trace_intake import TraceIntake
from asyncrl.queue.client import trace_link
from asyncrl.telemetry import tracing


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(trace_link, "SEND_S", 0.01)


def queue_of(folder: Path, ahead_s: float = 0.0) -> QueueState:
    """With an intake for that run folder; its clock is ahead of ours."""
    (folder / "trace").mkdir(parents=True)
    traces = TraceIntake(folder / "trace", 1_000_000)
    return QueueState("it", time=lambda: time.time() + ahead_s, traces=traces)


async def until(look) -> None:
    async with asyncio.timeout(20):
        while not look():
            await asyncio.sleep(0.01)


def test_rows_from_another_run_folder_travel_through_the_queue(tmp_path):
    state = queue_of(tmp_path / "queue")

    def events() -> list[str]:
        timeline = Timeline(tmp_path / "queue")
        timeline.read()
        return [event.name for _, event in timeline.events()]

    async def play() -> None:
        async with LocalQueue("it", queue=state) as queue:
            client = queue.client("generator-0")
            tracing.event("before it connects")
            await client.connect()
            await until(lambda: "before it connects" in events())
            tracing.event("meanwhile")
            await until(lambda: "meanwhile" in events())
            tracing.event("at the end")
            await client.close()

    with tracing.recording(tmp_path / "elsewhere", "generator-0", "generator", 1):
        asyncio.run(play())
    state.traces.close()
    assert events() == ["before it connects", "meanwhile", "at the end"]
    assert (tmp_path / "elsewhere" / "trace" / "generator-0.jsonl").exists()


def test_who_shares_the_run_folder_writes_itself_and_its_clock_is_that_of_the_queue(tmp_path):
    state = queue_of(tmp_path)
    with tracing.recording(tmp_path, "generator-0", "generator", 1):

        async def play() -> None:
            async with LocalQueue("it", queue=state) as queue:
                client = queue.client("generator-0")
                await client.connect()
                assert not client._trace_link.sends_rows
                await client._trace_link.send()
                await client.close()

        asyncio.run(play())
        tracing.event("once")
    state.traces.close()
    assert state.traces._names == set()
    text = (tmp_path / "trace" / "generator-0.jsonl").read_text()
    assert text.count('"once"') == 1
    assert '"clock":[0.0,' in text


def test_a_queue_whose_clock_is_another_gives_its_time(tmp_path):
    state = queue_of(tmp_path, ahead_s=-90.0)
    with tracing.recording(tmp_path, "generator-0", "generator", 1):

        async def play() -> None:
            async with LocalQueue("it", queue=state) as queue:
                client = queue.client("generator-0")
                await client.connect()
                await client.close()

        before = time.time()
        asyncio.run(play())
        tracing.event("now")
    state.traces.close()
    timeline = Timeline(tmp_path)
    timeline.read()
    process = timeline.processes["generator-0"]
    assert abs(process.offset_s + 90.0) <= process.offset_error_s + 0.001
    ((_, now),) = timeline.events()
    assert before - 90.0 - process.offset_error_s <= now.time <= time.time() - 90.0 + process.offset_error_s


def test_rows_that_find_no_room_are_sent_again_and_none_twice(tmp_path, monkeypatch):
    state = queue_of(tmp_path / "queue")
    take, tries = state.traces.take, []

    def unwilling(process: str, rows: bytes) -> bool:
        tries.append(rows)
        return len(tries) % 2 == 0 and take(process, rows)

    monkeypatch.setattr(state.traces, "take", unwilling)

    async def play() -> None:
        async with LocalQueue("it", queue=state) as queue:
            client = queue.client("generator-0")
            await client.connect()
            for number in range(3):
                tracing.event("something", number=number)
                await until(lambda number=number: len(tries) > 2 * number + 1)
            await client.close()

    with tracing.recording(tmp_path / "elsewhere", "generator-0", "generator", 1):
        asyncio.run(play())
    state.traces.close()
    timeline = Timeline(tmp_path / "queue")
    timeline.read()
    numbers = [event.about["number"] for _, event in timeline.events()]
    assert numbers == sorted(set(numbers))
    assert numbers[:2] == [0, 1]


def test_a_queue_that_refuses_the_rows_is_not_bothered_again(tmp_path, caplog):
    state = queue_of(tmp_path / "queue")

    async def play() -> None:
        async with LocalQueue("it", queue=state) as queue:
            client = queue.client("one")
            await client.connect()
            await until(lambda: not client._trace_link.sends_rows)
            await client.close()

    with tracing.recording(tmp_path / "elsewhere", "launcher", "generator", 1):
        asyncio.run(play())
    state.traces.close()
    assert "takes no rows" in caplog.text


def test_rows_that_are_gone_before_they_could_be_sent_are_named(tmp_path):
    state = queue_of(tmp_path / "queue")

    async def play() -> None:
        async with LocalQueue("it", queue=state) as queue:
            client = queue.client("generator-0")
            await client.connect()
            await client._trace_link.send()
            for number in range(25_000):
                tracing.event("something that has happened", number=number)
            await client._trace_link.send()
            await client._trace_link.send()
            await client.close()

    with tracing.recording(tmp_path / "elsewhere", "generator-0", "generator", 1):
        asyncio.run(play())
    state.traces.close()
    timeline = Timeline(tmp_path / "queue")
    timeline.read()
    missed = [event.about for _, event in timeline.events() if event.name == "rows_missed"]
    assert missed == [{"times": 1}]


def test_where_no_rows_are_sent_the_time_is_asked_for_less_and_less_also_of_a_queue_that_is_gone(
    tmp_path, monkeypatch
):
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 6:
            raise asyncio.CancelledError

    async def gone(request):
        raise AsyncRLError("no queue")

    monkeypatch.setattr(trace_link, "SEND_S", 1.0)
    monkeypatch.setattr(trace_link.asyncio, "sleep", sleep)
    with tracing.recording(tmp_path, "generator-0", "generator", 1):
        link = trace_link.TraceLink(tracing.current(), gone, "")
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(link.run())
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_clock_that_is_the_same_again_is_no_row(tmp_path):
    with tracing.recording(tmp_path, "generator-0", "generator", 1):
        link = trace_link.TraceLink(tracing.current(), None, "")
        for sent in (100.0, 102.0, 104.0):
            link.observe(sent, sent + 5.5, sent + 1.0)
        link.observe(106.0, 111.25, 106.5)  # a shorter way, which says more
    text = (tmp_path / "trace" / "generator-0.jsonl").read_text()
    assert [line.partition('"clock":')[2] for line in text.splitlines() if "clock" in line] == [
        "[5.0,0.5]}",
        "[5.0,0.25]}",
    ]
