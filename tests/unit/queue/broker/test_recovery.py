"""A queue whose broker dies at any moment: what was answered stays, and the ledger goes on as if nothing had been."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import RETURNS, Run, comparable, play, schedules, streams
from memory_journal import MemoryJournal
from raw_request import session_request
from recovered_queue import TRAIN, Queue

from asyncrl.errors import JournalError
from asyncrl.queue.broker.handlers import handle
from asyncrl.queue.broker.recovery import Recovery
from asyncrl.queue.ledger.events import Renewed
from asyncrl.queue.ledger.transitions import apply
from asyncrl.queue.protocol.requests import VERBS
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.queue.storage.records import (
    Closed,
    Happened,
    Posted,
    StreamState,
    TasksKept,
    decode_record,
    encode_record,
)
from asyncrl.queue.storage.store import Frames, PayloadKey, PayloadStore


@given(streams(), schedules(RETURNS), schedules(RETURNS))
@settings(max_examples=60, deadline=None)
def test_a_snapshot_of_any_book_goes_on_like_the_book(
    stream: StreamSettings, before: list[tuple[str, int]], after: list[tuple[str, int]]
) -> None:
    run = Run(stream)
    play(run, before)
    state = run.ledger.state
    again = decode_record(encode_record(StreamState("train", state))).state
    assert comparable(again) == comparable(state)
    past = len(run.log)
    play(run, after)
    for event in run.log[past:]:
        apply(again, event)
    assert comparable(again) == comparable(state)


@given(st.integers(-(1 << 63), (1 << 64) - 1), st.text(max_size=5), st.binary(max_size=5))
def test_records_survive_the_codec(number: int, text: str, packed: bytes) -> None:
    records = [
        Happened(text, Renewed((number,), 1.5)),
        TasksKept(text, ((number, packed), (2, b""))),
        Posted(text, packed),
        Closed(text),
    ]
    assert [decode_record(encode_record(record)) for record in records] == records


@pytest.fixture(params=[False, True], ids=["metadata", "payload"])
def queue(request: pytest.FixtureRequest) -> Queue:
    queue = Queue(durable=request.param)
    queue.open()
    queue.submit(0, 6)
    return queue


def test_everything_that_was_answered_is_there_again(queue: Queue) -> None:
    queue.ask("post", key="weights/0", value=b"endpoint")
    first, _ = queue.lease(2)
    assert first[:3] == [0, 1, b"task 0"]
    queue.die()
    assert queue.recovery.recovered
    assert queue.ask("lookup", key="weights/0") == {"found": True, "value": b"endpoint"}
    assert queue.states() == {
        0: "leased",
        1: "leased",
        2: "pending",
        3: "pending",
        4: "pending",
        5: "pending",
    }
    assert queue.ask("renew", leases={"train": [[0, 1], [1, 2]]}, stats=b"")["lost"] == []
    assert queue.commit(0, first[1]) is None
    assert queue.lease()[0][:3] == [2, 3, b"task 2"]
    opening = {"stream": "train", "settings": asdict(TRAIN), "call": 2}
    assert queue.ask("open", "learner", **opening) == "occupied"


def test_what_was_not_answered_may_be_gone(queue: Queue) -> None:
    args = {"stream": "train", "held": 0, "lineage": 0, "most": 1}
    assert handle(queue.state, session_request("lease", "w/1", args), 0.0) is not None
    queue.die()  # before the flush that its reply waits for
    assert queue.states()[0] == "pending"


def test_payloads_are_flushed_before_the_journal_that_speaks_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker may die between the two."""
    queue = Queue(durable=True)
    queue.open()
    queue.submit(0, 6)
    ((_, epoch, *_),) = queue.lease()

    def dies() -> None:
        raise BrokenPipeError

    monkeypatch.setattr(queue.recovery._journal, "flush", dies)
    with pytest.raises(BrokenPipeError):
        queue.commit(0, epoch)
    assert [frames for frames, _ in queue.payloads.values()] == [(b"group 0",)]
    queue.die()
    assert queue.states()[0] == "leased"


def test_leases_begin_anew_under_the_new_clock(queue: Queue) -> None:
    queue.lease(2)
    queue.die()
    queue.now += 29.0
    queue.state.expire(queue.now)
    assert queue.states()[0] == "leased"
    queue.now += 2.0
    queue.state.expire(queue.now)
    assert queue.states()[0] == "pending"


def test_ready_groups_are_there_or_are_made_again(queue: Queue) -> None:
    assert queue.make(3) == [0, 1, 2]
    queue.die()
    if queue.payloads:
        assert list(queue.states().values()) == ["ready"] * 3 + ["pending"] * 3
        assert queue.frames(0) == [b"group 0", b"group 1"]
    else:
        assert list(queue.states().values()) == ["pending"] * 6
        assert queue.make(3) == [0, 1, 2]


def test_a_payload_of_another_lease_is_not_the_one_that_was_committed() -> None:
    """The store was flushed with what came later, and the journal that speaks of it was lost with the broker."""
    queue = Queue(durable=True)
    queue.open()
    queue.submit(0, 6)
    queue.make(2)
    key = PayloadKey("train", 0, "group")
    _, stamp = queue.payloads[key]
    queue.payloads[key] = ((b"of another lease",), stamp + 1)
    queue.die()
    assert list(queue.states().values()) == ["pending", "ready"] + ["pending"] * 4
    assert queue.make(1) == [0]
    assert queue.frames(0) == [b"group 0", b"group 1"]


def test_a_learner_that_has_its_groups_need_not_know(queue: Queue) -> None:
    queue.make(2)
    assert queue.claim(0)["last"]
    queue.die()
    assert queue.trained(0)["version"] == 1
    queue.die()
    assert queue.trained(0)["version"] == 1
    assert queue.states()[2] == "pending"


def test_a_learner_that_asks_for_lost_groups_begins_the_step_anew(queue: Queue) -> None:
    queue.make(2)
    assert queue.claim(0)["attempt"] == 0
    queue.die()
    if queue.payloads:
        again = queue.claim(0)
        assert (again["groups"], again["last"], again["attempt"]) == ([1, 1], True, 0)
        return
    assert queue.claim(0) == "abandoned"
    assert queue.claim(0, index=1, attempt=0) == "abandoned"
    assert queue.states()[0] == "pending"
    assert queue.make(2) == [0, 1]
    assert (queue.claim(0)["attempt"], queue.claim(0)["last"]) == (1, True)
    assert queue.trained(0)["version"] == 1


def test_trained_steps_are_handed_out_again_while_their_payloads_are_there(queue: Queue) -> None:
    start = queue.snapshot()
    queue.make(2)
    queue.claim(0)
    queue.trained(0)
    queue.die()
    queue.open(start, call=2)
    if queue.payloads:
        assert queue.states()[0] == "recorded"
        assert queue.frames(0) == [b"group 0", b"group 1"]
    else:
        assert queue.states() == {}  # the feeder starts again from the snapshot
    assert queue.lineage == 1


def test_progress_of_a_task_is_there_again(queue: Queue) -> None:
    ((_, epoch, *_),) = queue.lease()
    queue.ask("progress", frames=(b"half",), stream="train", ordinal=0, epoch=epoch, nbytes=4)
    queue.die()
    queue.ask("give_back", stream="train", leases=[[0, epoch]])
    ((ordinal, _, _, frames),) = queue.lease()
    assert (ordinal, frames) == (0, 1 if queue.payloads else 0)


def test_an_end_is_an_end_and_the_next_broker_begins_anew(queue: Queue) -> None:
    queue.make(2)
    queue.ask("finish", reason="done")
    queue.die()
    assert (queue.state.closed, queue.state.streams, queue.recovery.recovered) == (None, {}, False)
    queue.recovery.flush()
    assert queue.payloads == {}


def test_anew_forgets_everything(queue: Queue) -> None:
    queue.make(2)
    queue.start(anew=True)
    assert queue.state.streams == {}
    queue.die()
    assert queue.state.streams == {}
    queue.recovery.flush()
    assert queue.payloads == {}


def test_a_journal_of_something_else_is_refused() -> None:
    journal = MemoryJournal()
    list(journal.replay())
    journal.append(b"\x93\xa7Renewed\xa5train\x07")
    journal.flush()
    with pytest.raises(JournalError, match="Renewed: Expected `array`, got `int`"):
        Recovery("run", MemoryJournal(journal.kept), PayloadStore(), now=0.0)


def test_a_snapshot_in_the_journal_is_as_good_as_all_before(queue: Queue) -> None:
    queue.ask("post", key="k", value=b"v")
    queue.make(1)
    queue.lease()
    before = comparable(queue.state.streams["train"].ledger.state)
    queue.recovery._journal.compact(encode_record(record) for record in queue.recovery._snapshot())
    assert len(queue.batches) == 1
    if queue.payloads:
        queue.die()
        after = comparable(queue.state.streams["train"].ledger.state)
        leases = [dict(lease, at=0.0, deadline=30.0) for lease in after["leases"]]
        assert {**after, "leases": leases} == before
    queue.die()
    assert queue.state.registry == {"k": b"v"}
    assert queue.lease()[0][2] == b"task 0" if not queue.payloads else b"task 2"


# ---------------------------------------------------------------------- requests that come again


class Twice:
    """Asks, lets the broker die with the answer, and asks again."""

    def __init__(self, queue: Queue, stream: str) -> None:
        self.queue, self.stream, self.ops = queue, stream, set[str]()

    def __call__(self, op: str, again: Any = ..., frames: Frames = (), **args: Any) -> Any:
        """The first answer. again: the second one, if it is another. Counts may differ where payloads were lost.
        A broker knows the workers of its own time alone."""
        self.ops.add(op)
        first = self.queue.ask(op, "w", frames, **args)
        self.queue.die()
        second = self.queue.ask(op, "w", frames, **args)
        for value in (first, second):
            if isinstance(value, dict):
                value.pop("depth", None)
                value.pop("workers", None)
        assert second == (first if again is ... else again)
        return first

    def on_stream(self, op: str, again: Any = ..., frames: Frames = (), **args: Any) -> Any:
        return self(op, again, frames, stream=self.stream, **args)

    def leased(self, op: str = "lease", **args: Any) -> tuple[int, int]:
        """Ordinal and epoch of what is leased; the second lease, of which nobody knows, has run out then."""
        self.ops.add(op)
        ((ordinal, epoch, *_),) = self.queue.ask(op, stream=self.stream, most=1, **args)
        self.queue.die()
        self.queue.ask(op, stream=self.stream, most=1, **args)
        self.queue.now += 31.0
        self.queue.state.expire(self.queue.now)
        ((again, epoch, *_),) = self.queue.ask(op, stream=self.stream, most=1, **args)
        assert again == ordinal
        return ordinal, epoch


def test_every_request_may_come_again_after_a_restart() -> None:
    """In the order of a run's life. One that leases leaves a lease of which nobody knows, and which runs out."""
    queue = Queue(durable=True)
    twice = Twice(queue, "train")
    critic = {"name": "critic", "needs": [], "adds": ["values"]}
    settings = {**asdict(TRAIN), "stages": [critic]}

    twice("hello", again=ANY)
    twice("post", key="k", value=b"v")
    twice("lookup", key="k")
    twice("trace", again=ANY, process="elsewhere", rows=b"{}\n")
    opened = twice.on_stream("open", settings=settings, call=1)
    queue.epoch = opened["learner_epoch"]
    learner = {"learner_epoch": queue.epoch, "step": 0}
    tasks = [[ordinal, b"task"] for ordinal in range(6)]
    twice.on_stream("submit", tasks=tasks, min_version=0)
    twice.on_stream("room")
    twice.on_stream("scores", since=0)
    twice.on_stream("exhaust", at=6)

    ordinal, epoch = twice.leased(held=0, lineage=0)
    twice("renew", leases={"train": [[ordinal, epoch]]}, stats=b"")
    twice.on_stream("progress", frames=(b"half",), ordinal=ordinal, epoch=epoch, nbytes=4)
    numbers = {"tokens": 1, "start_version": 0, "digest": 3, "nbytes": 5}
    twice.on_stream("commit", frames=(b"group",), ordinal=ordinal, epoch=epoch, **numbers)
    twice.on_stream("peek", again=ANY, ordinal=ordinal)
    _, epoch = twice.leased("stage_lease", stage="critic")
    column = {"stage": "critic", "ordinal": ordinal, "epoch": epoch}
    twice.on_stream("stage_commit", frames=(b"v",), version=0, digest=4, nbytes=1, **column)
    assert queue.states()[ordinal] == "ready"

    ordinal, epoch = twice.leased(held=0, lineage=0)
    twice.on_stream("drop", "fenced", ordinal=ordinal, epoch=epoch, reason="reward")
    ordinal, epoch = twice.leased(held=0, lineage=0)
    twice.on_stream("give_back", leases=[[ordinal, epoch]])
    ordinal, epoch = twice.leased(held=0, lineage=0)
    assert queue.commit(ordinal, epoch) is None
    _, epoch = twice.leased("stage_lease", stage="critic")
    twice.on_stream("stage_drop", "fenced", stage="critic", ordinal=ordinal, epoch=epoch, reason="unscored")
    ordinal, epoch = twice.leased(held=0, lineage=0)
    assert queue.commit(ordinal, epoch) is None

    share = {"index": 0, "rank": 0, "max_tokens": 9, "whole": True, "attempt": None}
    assert twice.on_stream("claim", **learner, **share)["so_far"] == 2
    assert twice.on_stream("abandon", **learner, attempt=0, dropped=[], reason="corrupt") == 1
    assert twice.on_stream("claim", **learner, **share)["so_far"] == 2
    assert twice.on_stream("reject", 0, **learner, reason="loss") == 2
    for _ in range(2):
        assert queue.commit(*twice.leased(held=0, lineage=0)) is None
    assert twice.on_stream("claim", **learner, **share)["so_far"] == 2
    assert twice.on_stream("trained", **learner)["version"] == 1
    twice.on_stream("checkpointed", learner_epoch=queue.epoch, version=1)
    snapshot = twice.on_stream("snapshot", learner_epoch=queue.epoch)
    assert twice.on_stream("open", settings=settings, snapshot=snapshot, call=2)["lineage"] == 1
    assert twice.on_stream("drain", 0) == 0

    evals = Twice(queue, "eval")
    unbounded = {**asdict(TRAIN), "max_staleness": None, "window": None}
    epoch = evals.on_stream("open", settings=unbounded, call=3)["learner_epoch"]
    evals.on_stream("collect", learner_epoch=epoch, got=[])
    twice("status", again=ANY)
    twice("goodbye")
    assert queue.state.streams["train"].ledger.counts(0.0)["dropped_by_reason"] == {
        "reward": 1,
        "unscored": 1,
        "loss": 2,
    }
    twice("finish", reason="done")
    assert twice.ops | evals.ops == {*VERBS}


def test_a_step_that_is_rejected_or_abandoned_twice_is_so_once(queue: Queue) -> None:
    queue.make(4)
    queue.claim(0)
    reject = {"stream": "train", "learner_epoch": queue.epoch, "step": 0, "reason": "loss"}
    assert queue.ask("reject", **reject) == 2
    queue.die()
    assert queue.ask("reject", **reject) == 0
    if not queue._durable:
        queue.make(2)
    queue.claim(0)
    attempt = queue.claim(0)["attempt"]
    abandon = {"stream": "train", "learner_epoch": queue.epoch, "step": 0, "attempt": attempt}
    abandon |= {"dropped": [2], "reason": "corrupt"}
    assert queue.ask("abandon", **abandon) == attempt + 1
    queue.die()
    assert queue.ask("abandon", **abandon) == attempt + 1
    assert queue.state.streams["train"].ledger.counts(0.0)["dropped_by_reason"] == {"loss": 2, "corrupt": 1}


def test_what_was_collected_and_not_received_comes_again() -> None:
    queue = Queue(durable=True)
    unbounded = {**asdict(TRAIN), "max_staleness": None, "window": None}
    opened = queue.ask("open", "learner", stream="train", settings=unbounded, call=1)
    queue.epoch = opened["learner_epoch"]
    queue.submit(0, 2)
    for ordinal, epoch, *_ in queue.lease(2):
        queue.commit(ordinal, epoch)
    collect = {"stream": "train", "learner_epoch": queue.epoch}
    assert queue.ask("collect", **collect, got=[])["groups"] == [1, 1]
    queue.die()
    assert queue.ask("collect", **collect, got=[0])["groups"] == [1]
    queue.die()
    assert queue.ask("collect", **collect, got=[0, 1])["groups"] == []
    assert queue.state.streams["train"].ledger.counts(0.0)["trained"] == 2
