"""Generators that hand versions on to each other: bookkeeping, and real relays in threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from stream_cases import LARGE, LARGE_CONFIG, Generator, Learner, closing_all
from waiting import Clock

from asyncrl.errors import DeadlineError, RefusedError, WeightSyncError
from asyncrl.sync.channels.channel import Channel, Meeting
from asyncrl.sync.channels.choose import Kind, accept
from asyncrl.sync.channels.listener import ChannelListener
from asyncrl.sync.layout.layout import layout_bytes
from asyncrl.sync.plan.plan import SourcePlan
from asyncrl.sync.plan.tree import Links, Member
from asyncrl.sync.stream.link import PublisherLink
from asyncrl.sync.stream.membership import Joined, Membership
from asyncrl.sync.stream.relay import Relay, StagingSource
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.sync.tensors.shards import Shards

closing = pytest.fixture(closing_all)

CHAIN = replace(LARGE_CONFIG, fanout=1)
LINKS = Links(learner=12.5e9, member=12.5e9, local=12.5e9)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parents are passed by where a test means it, and not because this machine is busy."""
    monkeypatch.setattr("asyncrl.sync.stream.subscriber.PARENT_S", 20.0)


# ---- membership


def member(who: str, host: str = "far", layout: str = "whole", bytes_: int = 1000) -> Joined:
    return Joined(Member(who, host, layout), bytes_, f"tcp://{who}")


def chain(*names: str, **more: object) -> Membership:
    members = Membership("here", 100, LINKS, 1, 30.0, **more)  # type: ignore[arg-type]
    for name in names:
        members.join(member(name))
    return members


def parents(members: Membership) -> dict[str, str | None]:
    above = {who: members.parent(who) for who in members.versions()}
    return {who: None if joined is None else joined.member.who for who, joined in above.items()}


def test_members_form_a_chain_and_close_its_gaps() -> None:
    members = chain("a", "b", "c")
    assert parents(members) == {"a": None, "b": "a", "c": "b"}
    members.leave("b")
    assert parents(members) == {"a": None, "c": "a"}
    members.join(member("d", layout="half"))
    assert parents(members) == {"a": None, "c": "a", "d": None}, "another layout is another tree"


def test_a_silent_member_is_fenced_and_those_below_it_go_on() -> None:
    clock = Clock()
    members = chain("a", "b", "c", clock=clock)
    clock.now = 20.0
    assert members.seen("a")
    assert members.seen("c")
    clock.now = 40.0
    assert members.fence() == ["b"]
    assert parents(members) == {"a": None, "c": "a"}
    assert not members.seen("b")
    assert members.stats() == {"members": 2, "fenced": 1, "reports": 0}


def test_a_parent_that_failed_feeds_nobody_until_it_holds_a_later_version() -> None:
    members = chain("a", "b", "c")
    members.held("b", 3)
    members.report("b")
    assert parents(members) == {"a": None, "b": None, "c": "a"}
    members.held("b", 3)
    assert parents(members)["c"] == "a"
    members.held("b", 4)
    assert parents(members) == {"a": None, "b": "a", "c": "b"}
    members.report("never heard of")
    assert members.stats()["reports"] == 2


def test_by_default_what_is_near_or_small_takes_from_the_learner() -> None:
    members = Membership("here", 100, LINKS, None, 30.0)
    for joined in (member("near", "here"), member("near-2", "here"), member("small", bytes_=100, layout="s")):
        members.join(joined)
    members.join(member("small-2", bytes_=100, layout="s"))
    assert set(parents(members).values()) == {None}
    members.join(member("far-1"))
    members.join(member("far-2"))  # on one host: the wire to it is crossed once
    assert parents(members)["far-2"] == "far-1"
    none = Membership("here", 100, LINKS, 0, 30.0)
    none.join(member("a"))
    none.join(member("b"))
    assert parents(none) == {"a": None, "b": None}


def test_joining_again_forgets_what_was_held() -> None:
    members = chain("a")
    members.held("a", 7)
    assert members.versions() == {"a": 7}
    members.join(member("a"))
    assert members.versions() == {"a": -1}


def test_joining_again_takes_a_new_place_and_leaves_the_old_one() -> None:
    members = chain("a", "b", "c")
    members.join(member("a"))
    assert parents(members) == {"c": None, "b": "c", "a": "b"}
    members.leave("a")
    assert parents(members) == {"c": None, "b": "c"}


def test_the_members_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.sync.stream.membership.MOST_MEMBERS", 2)
    members = chain("a", "b")
    with pytest.raises(RefusedError, match="full"):
        members.join(member("c"))
    members.join(member("b"))
    members.leave("a")
    members.join(member("c"))
    assert sorted(members.versions()) == ["b", "c"]


# ---- what a relay has


def test_children_wait_for_buckets_and_for_the_acknowledgement() -> None:
    staging = StagingSource("parent", Shards({}, {}), SourcePlan(0, ()))
    with pytest.raises(LookupError):
        staging.pin(3, "child")
    staging.begin(3)
    pin = staging.pin(3, "child")
    assert pin is not None
    with pytest.raises(
        DeadlineError, match=r"child waited 0\.0 s for parent: version 3, bucket 1 did not come"
    ):
        staging.ready(pin, 1, 0.0)
    staging.arrived(1)
    staging.ready(pin, 1, 0.0)
    with pytest.raises(DeadlineError, match="version 3, all of it"):
        staging.share(pin, staging.plan, 0.0)
    staging.complete(99)
    assert staging.share(pin, staging.plan, 0.0) == 99
    assert staging.pin(2, "child") is None, "gone"
    staging.begin(3)
    staging.moved(pin)


def test_the_next_version_or_a_failure_cancels_the_children() -> None:
    staging = StagingSource("parent", Shards({}, {}), SourcePlan(0, ()))
    staging.begin(3)
    first = staging.pin(3, "child")
    assert first is not None
    staging.arrived(0)
    staging.begin(4)
    with pytest.raises(SnapshotEvictedError, match="version 3 was taken back from child by parent"):
        staging.ready(first, 0, 0.0)
    second = staging.pin(4, "child")
    assert second is not None
    with pytest.raises(DeadlineError):
        staging.ready(second, 0, 0.0)  # bucket 0 of version 3 does not count
    staging.complete(5)
    staging.withdraw()
    with pytest.raises(SnapshotEvictedError):
        staging.share(second, staging.plan, 0.0)
    with pytest.raises(LookupError):
        staging.pin(4, "child")


# ---- relays


def fetch_all(threads: ThreadPoolExecutor, generators: list[Generator], held: int, version: int) -> list:
    fetched = [threads.submit(generator.fetch, held, 20.0) for generator in generators]
    staged = [future.result(30.0) for future in fetched]
    for generator, one in zip(generators, staged, strict=True):
        generator.check(one, version)
    return staged


@pytest.mark.parametrize("world", [1, 2])
def test_a_chain_of_three_costs_the_learner_one_copy(
    world: int, closing: Callable, threads: ThreadPoolExecutor
) -> None:
    learner = closing(Learner(LARGE, world, CHAIN))
    generators = [closing(Generator(who, learner, learner.whole, CHAIN)) for who in "abc"]
    for generator in generators:
        assert generator.subscriber.newest(-1, 0.0) is None  # joins
    learner.publish(0)
    for version in range(3):
        staged = fetch_all(threads, generators, version - 1, version)
        assert [one.source for one in staged] == [None, "a", "b"]
        learner.publish(version + 1)
    sent = sum(publisher.stats()["bytes"] for publisher in learner.publishers)
    assert sent == 3 * layout_bytes(learner.whole)
    assert [g.relay.server.stats()["transfers"] for g in generators] == [3, 3, 0]


def test_what_is_held_is_acknowledged_and_a_fenced_one_joins_again(closing: Callable) -> None:
    learner = closing(Learner(LARGE, 1, CHAIN))
    a, b = (closing(Generator(who, learner, learner.whole, CHAIN)) for who in "ab")
    learner.publish(0)
    rank_0 = learner.publishers[0]
    for generator in (a, b):
        generator.check(generator.fetch(-1, 10.0), 0)
    assert rank_0._members.versions() == {"a": -1, "b": -1}
    a.subscriber.held(0)
    assert rank_0._members.versions() == {"a": 0, "b": -1}
    learner.publish(1)
    assert (rank_0.stats()["held"], rank_0.stats()["lag"]) == (0, 1)
    rank_0._members._silence_s = -1.0
    learner.publish(2)  # looks for silent ones
    b.subscriber.held(0)
    rank_0._members._silence_s = 300.0
    assert rank_0.stats()["fenced"] >= 2
    b.check(b.fetch(0, 10.0), 2)
    b.subscriber.held(2)
    assert rank_0._members.versions()["b"] == 2


class Hold:
    """Lets a generator receive so many buckets, then holds it until `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, who: str, buckets: int) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._left = buckets
        arrived = Relay.arrived

        def counted(relay: Relay, rank: int | None, bucket: int) -> None:
            arrived(relay, rank, bucket)
            if relay.who == who:
                self._left -= 1
                if self._left == 0:
                    self.reached.set()
                    assert self.open.wait(20.0)

        monkeypatch.setattr(Relay, "arrived", counted)


def test_a_version_published_in_the_middle_takes_the_memory_of_the_parent_back(
    closing: Callable, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = Hold(monkeypatch, "b", 3)
    learner = closing(Learner(LARGE, 1, CHAIN))
    a, b = (closing(Generator(who, learner, learner.whole, CHAIN)) for who in "ab")
    for generator in (a, b):
        assert generator.subscriber.newest(-1, 0.0) is None
    learner.publish(0)
    a.check(a.fetch(-1, 20.0), 0)
    b_fetched = threads.submit(b.fetch, -1, 20.0)
    assert hold.reached.wait(20.0)
    learner.publish(1)
    a.check(a.fetch(0, 20.0), 1)  # waits for no child
    hold.open.set()
    staged = b_fetched.result(20.0)
    b.check(staged, 1)
    assert staged.source == "a"
    assert a.relay.server.stats()["taken_back"] == 1


def test_what_did_not_arrive_whole_is_handed_on_to_nobody(
    closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = closing(Learner(LARGE, 1, CHAIN))
    a = closing(Generator("a", learner, learner.whole, CHAIN))
    learner.publish(0)
    relay = None

    def cut(link: PublisherLink, *words: object) -> None:
        nonlocal relay
        relay = a.relay
        assert relay is not None
        assert relay.source.pin(0, "child") is not None, "it was about to be handed on"
        raise WeightSyncError("cut off")

    monkeypatch.setattr(PublisherLink, "receive", cut)
    with pytest.raises(WeightSyncError, match="cut off"):
        a.subscriber.stage(0)
    assert relay is not None
    with pytest.raises(LookupError):
        relay.source.pin(0, "child")


def test_a_parent_that_does_not_begin_is_reported_and_passed_by(
    closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.sync.stream.subscriber.PARENT_S", 0.1)
    learner = closing(Learner(LARGE, 1, CHAIN))
    a, b = (closing(Generator(who, learner, learner.whole, CHAIN)) for who in "ab")
    for generator in (a, b):
        assert generator.subscriber.newest(-1, 0.0) is None
    for version in range(2):  # a is busy with something else
        learner.publish(version)
        staged = b.fetch(version - 1, 20.0)
        b.check(staged, version)
        assert staged.source is None
    assert learner.publishers[0].stats()["reports"] == 1


def test_a_parent_that_opens_no_channel_is_passed_by_long_before_the_deadline_of_a_transfer(
    closing: Callable, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that dies after it has answered."""
    monkeypatch.setattr("asyncrl.sync.stream.subscriber.PARENT_S", 0.1)
    over = threading.Event()

    def admitted(kind: Kind, listener: ChannelListener, meeting: Meeting) -> Channel:
        if meeting.who.startswith("a,"):
            over.wait(60.0)
        return accept(kind, listener, meeting)

    monkeypatch.setattr("asyncrl.sync.stream.sender.accept", admitted)
    learner = closing(Learner(LARGE, 1, CHAIN))
    a = closing(Generator("a", learner, learner.whole, CHAIN))
    b = closing(Generator("b", learner, learner.whole, replace(CHAIN, deadline_s=200.0)))
    for generator in (a, b):
        assert generator.subscriber.newest(-1, 0.0) is None
    learner.publish(0)
    try:
        staged = threads.submit(b.fetch, -1, 20.0).result(30.0)
    finally:
        over.set()
    b.check(staged, 0)
    assert staged.source is None


def test_children_of_one_that_leaves_in_the_middle_go_on_with_the_learner(
    closing: Callable, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.sync.stream.subscriber.PARENT_S", 1.0)
    hold = Hold(monkeypatch, "a", 2)
    learner = closing(Learner(LARGE, 1, CHAIN))
    a = Generator("a", learner, learner.whole, replace(CHAIN, deadline_s=1.0))
    b = closing(Generator("b", learner, learner.whole, CHAIN))
    for generator in (a, b):
        assert generator.subscriber.newest(-1, 0.0) is None
    learner.publish(0)
    a_fetched = threads.submit(a.fetch, -1, 0.0)
    b_fetched = threads.submit(b.fetch, -1, 20.0)
    assert hold.reached.wait(20.0)
    a.relay.close()
    staged = b_fetched.result(20.0)
    b.check(staged, 0)
    assert staged.source is None
    hold.open.set()
    a_fetched.exception(20.0)
    a.subscriber.close()
    c = closing(Generator("c", learner, learner.whole, CHAIN))
    c.check(c.fetch(-1, 20.0), 0)
