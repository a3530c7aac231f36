"""Machines that watch each other through a store, which is a dictionary here."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.config.sections.queue import QueueConfig
from asyncrl.config.sections.run import LaunchConfig
from asyncrl.errors import AsyncRLError, DeadlineError, RankLostError
from asyncrl.learner.ranks import machine_watch, process_group
from asyncrl.learner.ranks.machine_watch import LOOKS, MachineWatch, begin_watch
from asyncrl.learner.ranks.queue_store import QueueStore
from asyncrl.system import rank_process
from asyncrl.system.rank_process import MEETING

DEADLINE_S = 60.0
EVERY_S = DEADLINE_S / LOOKS
LONG_S = 30.0


class Entries(dict[str, bytes]):
    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def find(self, key: str) -> bytes | None:
        return self.get(key)


def watches(store: Entries, machines: int) -> list[MachineWatch]:
    return [MachineWatch(store, "learner", machine, machines, DEADLINE_S) for machine in range(machines)]


def look(times: int, *watched: MachineWatch) -> None:
    for _ in range(times):
        for watch in watched:
            watch.look(EVERY_S)


def test_machines_that_give_signs_are_not_lost() -> None:
    look(10 * LOOKS, *watches(Entries(), 3))


@pytest.mark.parametrize("begun", [False, True])
def test_the_one_before_a_silent_machine_names_it_and_all_others_end_at_their_next_look(begun: bool) -> None:
    """Also one that has met the others, and was lost before it gave a sign."""
    first, second, third = watches(Entries(), 3)
    if begun:
        look(3, first, second, third)
    look(LOOKS - 1 + begun, first, second)
    first.look(EVERY_S)
    with pytest.raises(
        RankLostError, match=r"learner: a machine \(--node 2.*\) gave .* no sign of life for 60 s"
    ):
        second.look(EVERY_S)
    with pytest.raises(RankLostError, match=r"a machine \(--node 2"):
        first.look(EVERY_S)
    with pytest.raises(RankLostError, match=r"this machine \(--node 2"):
        third.look(EVERY_S)


def test_a_machine_that_has_left_in_order_is_not_lost() -> None:
    first, second = watches(Entries(), 2)
    look(2, first, second)
    second.leave()
    look(2 * LOOKS, first)


def test_an_entry_that_names_no_machine_is_none() -> None:
    store = Entries(lost=b"\xff")
    look(2, *watches(store, 2))


class Answers(Entries):
    """Each look raises what comes next, or does what comes next; the one after the last waits until it is `over`."""

    def __init__(self, *answers: Exception | None) -> None:
        super().__init__()
        self._answers, self.looked, self.over = list(answers), threading.Event(), threading.Event()

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        if not self._answers:
            self.looked.set()
            self.over.wait(LONG_S)
        elif (error := self._answers.pop(0)) is not None:
            raise error

    def ends(self, leave: Callable[[], None]) -> None:
        """The look that waits goes on, and the machine leaves."""
        assert self.looked.wait(LONG_S)
        threading.Timer(0.0, self.over.set).start()
        leave()


def test_time_in_which_the_queue_does_not_answer_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It seems to take an hour for each answer; the other machine gives no sign."""
    hours = itertools.count(step=3600)
    monkeypatch.setattr(machine_watch, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    ended: list[AsyncRLError] = []
    store = Answers(*[None] * (LOOKS // 3))
    store.ends(begin_watch(MachineWatch(store, "learner", 0, 2, 1.0), ended.append))
    assert ended == []


def test_a_rank_ends_with_the_error_that_names_the_lost_machine() -> None:
    ended: SimpleQueue[AsyncRLError] = SimpleQueue()
    store = Answers(None)
    store["lost"] = b"1 b"
    leave = begin_watch(MachineWatch(store, "learner", 0, 2, 0.1), ended.put)
    assert "--node 1, host b" in str(ended.get(timeout=LONG_S))
    leave()
    assert store["machine/0"].startswith(b"1 "), "a machine that does not end in order does not leave"


def test_a_watch_outlives_any_error_and_notes_it_once(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[AsyncRLError] = []
    store = Answers(
        DeadlineError("a rank", "the queue", "an answer", 1.0), RuntimeError("can't start new thread"), None
    )
    store.ends(begin_watch(MachineWatch(store, "learner", 0, 2, 1.0), ended.append))
    assert ended == []
    assert len([record for record in caplog.records if "cannot be seen" in record.message]) == 1


def test_a_rank_that_ends_in_order_leaves() -> None:
    store = Answers(None)
    store.ends(begin_watch(MachineWatch(store, "learner", 0, 2, LONG_S), pytest.fail))
    assert store["machine/0"] == b"left"


@pytest.mark.parametrize(("rank", "machine"), [(0, 0), (1, None), (2, 1), (3, None)])
def test_the_first_rank_of_each_machine_watches_once_all_are_there(
    rank: int, machine: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longer of two deadlines counts."""
    happened: list[object] = []
    variables = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, MEETING: "queue:learner"}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(process_group, "_store", lambda *_: Mock(spec=QueueStore))
    monkeypatch.setattr(process_group.dist, "init_process_group", lambda *_, **__: happened.append("met"))
    monkeypatch.setattr(process_group, "exchange", lambda _: happened.append("all are there"))
    monkeypatch.setattr(process_group, "MachineWatch", lambda _, *of: of)
    monkeypatch.setattr(process_group, "begin_watch", happened.append)
    monkeypatch.setattr(process_group, "before_leaving", lambda _: happened.append("leaves in the end"))
    deadlines = {"launch": LaunchConfig(rank_deadline_s=5.0), "queue": QueueConfig(deadline_s=7.0)}
    process_group.join_process_group(torch.device("cpu"), replace(Config(), **deadlines))
    watched = [] if machine is None else [("learner", machine, 2, 7.0), "leaves in the end"]
    assert happened == ["met", "all are there", *watched]


@pytest.mark.parametrize(("code", "acts"), [(0, True), (10, True), (130, False), (1, False), (12, False)])
def test_a_rank_leaves_only_in_order(code: int, acts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(rank_process, "_leave", [lambda: left.append(code)])
    monkeypatch.setattr(rank_process.logging, "shutdown", lambda: None)
    monkeypatch.setattr(rank_process.os, "_exit", lambda _: None)
    rank_process.end_rank(code)
    assert left == [code] * acts
