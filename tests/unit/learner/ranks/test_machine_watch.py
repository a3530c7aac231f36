"""Machines that watch each other through a store, which is a dictionary here."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest

from asyncrl.errors import AsyncRLError, DeadlineError, RankLostError, RunClosedError
from asyncrl.learner.ranks import machine_watch
from asyncrl.learner.ranks.machine_watch import LOOKS, MachineWatch, begin_watch
from asyncrl.system import rank_process

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
        RankLostError, match=r"learner: a machine \(--node 2\) gave .* no sign of life for 60 s"
    ):
        second.look(EVERY_S)
    with pytest.raises(RankLostError, match=r"a machine \(--node 2\)"):
        first.look(EVERY_S)
    with pytest.raises(RankLostError, match=r"this machine \(--node 2\)"):
        third.look(EVERY_S)


def test_time_in_which_the_queue_does_not_answer_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It seems to take an hour for each answer; the other machine gives no sign."""
    hours = itertools.count(step=3600)
    monkeypatch.setattr(machine_watch, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    ended: list[AsyncRLError] = []
    store = Answers(*[None] * (LOOKS // 2))
    leave = begin_watch(MachineWatch(store, "learner", 0, 2, 1.0), ended.append)
    assert store.looked.wait(LONG_S)
    leave()
    assert ended == []


def test_a_machine_that_has_left_in_order_is_not_lost() -> None:
    first, second = watches(Entries(), 2)
    look(2, first, second)
    second.leave()
    look(2 * LOOKS, first)


def test_an_entry_that_names_no_machine_is_none() -> None:
    store = Entries(lost=b"\xff")
    look(2, *watches(store, 2))


class Answers(Entries):
    """Each look raises what comes next."""

    def __init__(self, *errors: AsyncRLError | None) -> None:
        super().__init__()
        self._errors, self.looked = list(errors), threading.Event()

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        error = self._errors.pop(0) if self._errors else None
        if not self._errors:
            self.looked.set()
        if error is not None:
            raise error


@pytest.mark.parametrize(
    "error", [DeadlineError("a rank", "the queue", "an answer", 1.0), RankLostError("gone")]
)
def test_a_rank_ends_with_the_error_that_names_who_was_lost(error: AsyncRLError) -> None:
    ended: list[AsyncRLError] = []
    store = Answers(None, RunClosedError("over"), error)
    leave = begin_watch(MachineWatch(store, "learner", 0, 2, 0.1), ended.append)
    assert store.looked.wait(LONG_S)
    leave()
    assert ended == [error]
    assert store["machine/0"] == b"3", "a machine that does not end in order does not leave"


def test_a_rank_that_ends_in_order_says_so() -> None:
    store = Answers(None, None)
    leave = begin_watch(MachineWatch(store, "learner", 0, 2, 1.0))
    assert store.looked.wait(LONG_S)
    leave()
    assert store["machine/0"] == b"left"


@pytest.mark.parametrize(("code", "acts"), [(0, True), (10, True), (130, True), (1, False), (12, False)])
def test_a_rank_leaves_only_in_order(code: int, acts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(rank_process, "_leave", [lambda: left.append(code)])
    monkeypatch.setattr(rank_process.logging, "shutdown", lambda: None)
    monkeypatch.setattr(rank_process.os, "_exit", lambda _: None)
    rank_process.end_rank(code)
    assert left == [code] * acts
