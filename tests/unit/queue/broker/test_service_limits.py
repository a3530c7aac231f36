"""What clients can make the broker keep is limited: at the limit it is taken, beyond it is refused and counted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from dispatcher_cases import TRAIN
from raw_request import request_of, session_request

from asyncrl.errors import RefusedError, WireError
from asyncrl.queue.broker import queue_state
from asyncrl.queue.broker.handlers import handle, refusal
from asyncrl.queue.broker.queue_state import QueueState
from asyncrl.queue.ledger import ledger
from asyncrl.queue.ledger.generator_commands import MAX_PROGRESS
from asyncrl.queue.protocol import requests
from asyncrl.queue.storage.store import Frames


class Bytes(bytes):
    """A payload that says that it is longer than it is."""

    nbytes = 0

    def __len__(self) -> int:
        return self.nbytes


@pytest.fixture
def queue() -> QueueState:
    queue = QueueState("run")
    assert ask(queue, "open", stream="train", settings=asdict(TRAIN), snapshot=None, call=1)["version"] == 0
    return queue


def ask(queue: QueueState, op: str, who: str = "w/1", frames: Frames = (), **args: Any) -> Any:
    """The value of the reply; of an error its kind and reason."""
    try:
        reply = handle(queue, session_request(op, who, args, frames), 0.0, late=True)
    except (RefusedError, WireError) as error:
        reply = refusal(queue, error)
    assert reply is not None
    return reply.value if reply.error is None else reply.error[:2]


FULL, MALFORMED = ("refused", "full"), ("wire", "")


def test_what_an_entry_of_the_directory_holds(queue: QueueState) -> None:
    assert ask(queue, "post", key="k", value=b"x" * queue_state.MAX_VALUE) is None
    assert ask(queue, "post", key="k", value=b"x" * (queue_state.MAX_VALUE + 1)) == FULL
    assert len(queue.registry["k"]) == queue_state.MAX_VALUE
    assert ask(queue, "renew", leases={}, stats=b"x" * (queue_state.MAX_VALUE + 1)) == FULL
    assert (queue.workers, queue.refused["full"]) == ({}, 2)


def test_how_many_entries_and_workers_there_are(queue: QueueState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_state, "MAX_KEYS", 3)
    for number in range(3):
        assert ask(queue, "post", key=f"{number}", value=b"") is None
    assert ask(queue, "post", key="more", value=b"") == FULL
    assert ask(queue, "post", key="0", value=b"again") is None
    for number in range(5):
        ask(queue, "renew", f"worker {number}/1", leases={}, stats=b"now")
    assert sorted(queue.workers) == ["worker 0", "worker 1", "worker 2"]


def test_how_many_streams_there_are(queue: QueueState) -> None:
    for number in range(queue_state.MAX_STREAMS - 1):
        assert ask(queue, "room", stream=f"{number}") == [0, 0]
    assert ask(queue, "room", stream="more") == FULL
    assert ask(queue, "room", stream="train") == [0, TRAIN.depth]


def test_how_long_texts_and_waits_are(queue: QueueState) -> None:
    assert ask(queue, "post", key="k" * requests.MAX_TEXT, value=b"") is None
    assert ask(queue, "post", key="k" * (requests.MAX_TEXT + 1), value=b"") == MALFORMED
    for wait_s in (requests.MAX_WAIT_S + 1, -1.0, float("nan"), float("inf"), "1"):
        with pytest.raises(WireError, match="wait_s"):
            request_of("room", {"stream": "train", "wait_s": wait_s})


def test_how_many_tasks_are_pending(queue: QueueState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MAX_PENDING", 3)
    tasks = [[ordinal, b"task"] for ordinal in range(4)]
    assert ask(queue, "submit", stream="train", tasks=tasks, min_version=0) == FULL
    assert ask(queue, "submit", stream="train", tasks=tasks[:3], min_version=0) is None
    assert ask(queue, "submit", stream="train", tasks=tasks[3:], min_version=0) == FULL


def test_how_much_is_kept_of_an_unfinished_task(queue: QueueState) -> None:
    ask(queue, "submit", stream="train", tasks=[[0, b"task"]], min_version=0)
    ((_, epoch, *_),) = ask(queue, "lease", stream="train", held=0, lineage=0, most=1)
    for nbytes, answer in ((MAX_PROGRESS, None), (MAX_PROGRESS + 1, FULL)):
        half = Bytes(b"half")
        half.nbytes = nbytes
        args = {"ordinal": 0, "epoch": epoch, "nbytes": nbytes}
        assert ask(queue, "progress", frames=(half,), stream="train", **args) == answer


def test_a_payload_is_as_long_as_it_was_announced(queue: QueueState) -> None:
    """A frame that was cut off on its way is no group."""
    ask(queue, "submit", stream="train", tasks=[[0, b"task"]], min_version=0)
    ((_, epoch, *_),) = ask(queue, "lease", stream="train", held=0, lineage=0, most=1)
    commit = {"stream": "train", "ordinal": 0, "epoch": epoch, "tokens": 1, "start_version": 0, "digest": 0}
    assert ask(queue, "commit", frames=(b"grou",), nbytes=5, **commit) == MALFORMED
    assert ask(queue, "commit", frames=(), nbytes=0, **commit) == MALFORMED
    assert ask(queue, "commit", frames=(b"group",), nbytes=5, **commit) is None


def test_how_long_the_reason_of_a_drop_is_and_how_many_are_told_apart(queue: QueueState) -> None:
    count = 70
    for first in range(0, count, TRAIN.depth):
        tasks = [[ordinal, b"task"] for ordinal in range(first, min(first + TRAIN.depth, count))]
        ask(queue, "submit", stream="train", tasks=tasks, min_version=0)
        for ordinal, epoch, *_ in ask(queue, "lease", stream="train", held=0, lineage=0, most=TRAIN.depth):
            drop = {"stream": "train", "ordinal": ordinal, "epoch": epoch}
            assert ask(queue, "drop", reason=f"{ordinal:04}" + "x" * 100, **drop) is None
    dropped = queue.streams["train"].ledger.state.tasks.dropped
    assert sum(dropped.values()) == count
    assert len(dropped) == 65
    assert dropped["other"] == 6
    assert {len(reason) for reason in dropped} == {64, len("other")}
