"""Journals that the code before wrote, by random schedules: the events of a stream, and its state after them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgpack
import pytest
from ledger_cases import comparable

from asyncrl.config.sections.queue import QueueConfig
from asyncrl.errors import JournalError
from asyncrl.queue.broker.queue_state import QueueState
from asyncrl.queue.broker.recovery import Recovery, open_recovery
from asyncrl.queue.ledger.state.ledger_state import LedgerState
from asyncrl.queue.storage.file_journal import FileJournal
from asyncrl.queue.storage.records import SCHEMA, Happened, Posted, StreamState, TasksKept
from asyncrl.queue.storage.records_before import SCHEMA_BEFORE, decode_before

DATA = Path(__file__).parents[3] / "data" / "journal_before"
CASES = ("columns", "plain")


@pytest.fixture(params=["events", "state"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path, case: str, kind: str) -> Path:
    shutil.copy(DATA / f"{case}_{kind}.journal", tmp_path / "journal")
    return tmp_path


def state_in(path: Path, kept: Path) -> LedgerState:
    """The state of the one stream, from its events or its snapshot."""
    kept.mkdir()
    shutil.copy(path, kept / "journal")
    journal, queue = FileJournal(kept, "before", SCHEMA, SCHEMA_BEFORE), QueueState("before")
    try:
        for packed in journal.replay():
            match decode_before(packed):
                case Happened(stream, event):
                    queue.add_stream(stream).replay(event)
                case StreamState(_, state):
                    return state
                case TasksKept() | Posted():
                    pass
        assert journal.outdated
        return queue.streams["train"].ledger.state
    finally:
        journal.close()


def test_events_and_state_are_read_alike(tmp_path: Path, case: str) -> None:
    by_events, by_state = (
        state_in(DATA / f"{case}_{kind}.journal", tmp_path / kind) for kind in ("events", "state")
    )
    assert comparable(by_events) == comparable(by_state)
    facts: dict[str, Any] = json.loads((DATA / f"{case}.json").read_text())
    tasks = by_state.tasks
    found = {
        "version": by_state.steps.version,
        "lineage": by_state.lineage,
        "next": tasks.next,
        "head": tasks.head,
        "leased": sorted(tasks.leased),
        "ready": list(tasks.ready),
        "partial": sorted(tasks.partial),
        "dropped": dict(tasks.dropped),
        "nbytes": by_state.usage.live,
    }
    assert found == {name: facts[name] for name in found}


def open_queue(folder: Path) -> Recovery:
    return open_recovery(QueueConfig(store="file"), "before", folder, now=0.0)


def test_such_a_journal_goes_on_in_the_records_of_now(folder: Path) -> None:
    first = open_queue(folder)
    queue = first.queue
    before, tasks = comparable(queue.streams["train"].ledger.state), queue.streams["train"].tasks
    assert queue.streams["train"].ledger.state.steps.version == 2
    first.flush()
    first.close()
    again = FileJournal(folder, "before", SCHEMA)  # it knows no schema of before
    assert [*again.replay()]
    again.close()
    second = open_queue(folder)
    after = second.queue.streams["train"]
    assert (comparable(after.ledger.state), after.tasks) == (before, tasks)
    assert second.queue.registry == queue.registry
    second.close()


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb("Happened"),
        msgpack.packb(["Happened", 3, ["Closed", "x"]]),
        msgpack.packb(["Happened", "train", []]),
        msgpack.packb(["Happened", "train", ["Leased", 1]]),
        msgpack.packb(["Happened", "train", ["StepTrained", "two"]]),
        msgpack.packb(["StreamState", "train", ["Book"]]),
        msgpack.packb(["StreamState", "train", 7]),
        msgpack.packb(["TasksKept", "train", ["tuple", 1]]),
        msgpack.packb(["Posted", 1, b""]),
        msgpack.packb(["Closed", 1]),
        msgpack.packb(["Unknown"]),
    ],
)
def test_damaged_records_are_refused(packed: bytes) -> None:
    with pytest.raises(JournalError):
        decode_before(packed)
