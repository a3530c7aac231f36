"""Ranks that meet through a registry: each as a thread, the registry a dictionary."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from asyncrl.config.schema import Config
from asyncrl.errors import DeadlineError
from asyncrl.learner.ranks import queue_store
from asyncrl.learner.ranks.queue_store import QueueRegistry, QueueStore, meet

LONG_S = 60.0


class Entries(dict[str, Any]):
    """A registry of the queue."""

    def post(self, key: str, value: Any) -> None:
        self[key] = value

    def lookup(self, key: str, wait_s: float) -> Any:
        try:
            return self[key]
        except KeyError:
            raise DeadlineError("a test", "the queue", key, wait_s) from None


def met(entries: Entries, world: int) -> list[QueueStore]:
    """The stores of one start."""
    with ThreadPoolExecutor(world) as threads:
        calls = [threads.submit(meet, entries, "learner", rank, world, LONG_S) for rank in range(world)]
        return [call.result() for call in calls]


def test_what_one_rank_sets_the_others_get() -> None:
    stores = met(Entries(), 3)
    stores[1].set("0/address", b"\x00\xff")
    stores[2].set("word", "text")
    assert [store.get("0/address") for store in stores] == [b"\x00\xff"] * 3
    assert stores[0].get("word") == b"text"
    assert stores[0].check(["0/address", "word"])
    assert not stores[0].check(["0/address", "nothing"])


def test_entries_of_an_earlier_start_are_never_used_and_the_registry_does_not_grow() -> None:
    entries = Entries()
    for store in (earlier := met(entries, 3)):
        store.set("address", b"of before")
    size = len(entries)
    stores = met(entries, 3)
    assert len(entries) == size
    assert not stores[0].check(["address"])
    with pytest.raises(DeadlineError, match="'address'"):
        stores[0].wait(["address"], timedelta(seconds=0.01))
    stores[2].set("address", b"of now")
    assert [store.get("address") for store in stores] == [b"of now"] * 3
    assert not earlier[0].check(["address"])
    assert len(entries) == size


@pytest.mark.parametrize("earlier", [False, True])
def test_who_does_not_come_is_named(earlier: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an earlier start has left entries of all ranks. The time is up once rank 0 has met rank 1."""

    class Watched(Entries):
        over = False

        def lookup(self, key: str, wait_s: float) -> Any:
            found = super().lookup(key, wait_s)
            self.over |= key == "ranks/learner/ack/1" and found[0] == self["ranks/learner/meeting"][0]
            return found

    entries = Watched()
    if earlier:
        met(entries, 3)
        entries.over = False
    with pytest.raises(DeadlineError, match=r"learner rank 1 waited .* for rank 0"):
        meet(entries, "learner", 1, 3, 0.01)
    clock = SimpleNamespace(monotonic=lambda: 2 * LONG_S * entries.over, sleep=lambda _: time.sleep(0.001))
    monkeypatch.setattr(queue_store, "time", clock)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(meet, entries, "learner", 0, 3, LONG_S)
        second = threads.submit(meet, entries, "learner", 1, 3, 4 * LONG_S)
        with pytest.raises(DeadlineError, match=r"learner rank 0 waited .* for rank 2"):
            first.result()
        second.result()  # it has met rank 0


def test_a_connection_that_is_in_use_is_kept_and_an_idle_one_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, timers = [], []

    def client(_: object) -> Mock:
        clients.append(Mock())
        return clients[-1]

    def timer(_: float, work: Callable[[], None]) -> Mock:
        timers.append(Mock(work=work))
        return timers[-1]

    monkeypatch.setattr(queue_store, "BlockingClient", client)
    monkeypatch.setattr(queue_store.threading, "Timer", timer)
    registry = QueueRegistry(Config(), "rank 0")
    registry.post("a", 1)
    registry.lookup("a", 0.0)
    assert [each.cancel.called for each in timers] == [True, False]
    assert len(clients) == 1
    assert not clients[0].close.called
    timers[-1].work()
    assert clients[0].close.called
    registry.post("b", 2)
    clients[1].post.assert_called_once_with("b", 2)


def test_a_key_that_was_deleted_is_not_there() -> None:
    first, second = met(Entries(), 2)
    first.set("id", "1")
    assert second.delete_key("id")
    assert not first.check(["id"])
    assert not first.delete_key("id")


def test_a_value_is_replaced_where_it_is_the_expected_one() -> None:
    first, second = met(Entries(), 2)
    assert first.compare_set("owner", "", "a") == b"a"
    assert second.compare_set("owner", "", "b") == b"a"
    assert second.compare_set("owner", "a", "b") == b"b"
    assert first.add("count", 2) == 2
    assert second.add("count", 3) == 5


@pytest.mark.parametrize("entry", [7, ["word"], ["word", 7]], ids=repr)
def test_an_entry_of_another_form_counts_as_none(entry: Any) -> None:
    """A peer with the run's keys has filled the keys of a start with it."""
    entries = Entries({f"ranks/learner/{key}": entry for key in ("join/1", "ack/1", "meeting")})
    stores = met(entries, 2)
    word = entries["ranks/learner/meeting"][0]
    for held in (None, 7, "word", {}, [], [word], [word, ["x"]], [word, 1 << 62], [word, b"", 1]):
        entries["ranks/learner/store/address"] = held
        assert not stores[0].check(["address"])
    stores[1].set("address", b"of now")
    assert stores[0].get("address") == b"of now"
