"""Subscribers that die or fall silent leave no thread, no descriptor and no pin behind, on any rank or relay."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from processes import started
from stream_cases import CONFIG, LARGE, LARGE_CONFIG, SMALL, Generator, Learner, closing_all

from asyncrl.sync.stream.link import PublisherLink
from asyncrl.sync.stream.version_server import VersionServer

closing = pytest.fixture(closing_all)

WAIT_S = 30.0
CHAIN = replace(LARGE_CONFIG, fanout=1)
SUBSCRIBER = str(Path(__file__).with_name("subscriber_process.py"))


def resources() -> tuple[list[str], int]:
    """Names of this process's threads, and the number of its open descriptors."""
    gc.collect()
    return sorted(thread.name for thread in threading.enumerate()), len(os.listdir("/proc/self/fd"))


def until(look: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < deadline, f"no {what} in {WAIT_S} s"
        time.sleep(0.01)


def freed(before: tuple[list[str], int]) -> None:
    """Wait until there is no thread and no descriptor more than before."""
    threads, descriptors = before

    def back() -> bool:
        threads_now, descriptors_now = resources()
        return not Counter(threads_now) - Counter(threads) and descriptors_now <= descriptors

    until(back, f"return to {before} from {resources()}")


def die(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """End without a word, as a killed process does."""
    with monkeypatch.context() as patch:
        patch.setattr(PublisherLink, "_request", lambda *request, **fields: None)
        generator.subscriber.close()


def servers(learner: Learner) -> list[VersionServer]:
    return [publisher._server for publisher in learner.publishers]


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_subscribers_that_die_leave_nothing_on_any_rank(
    backend: str, closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, backend=backend)  # type: ignore[arg-type]
    learner = closing(Learner(SMALL, 2, config))
    learner.publish(0)
    zmq.Context.instance().socket(zmq.PAIR).close()  # the clients' threads stay
    before = resources()
    for number in range(10):
        generator = Generator(f"generator-{number}", learner, learner.whole, config)
        generator.check(generator.fetch(-1, WAIT_S), 0)
        die(generator, monkeypatch)
    freed(before)
    learner.publish(1)
    until(lambda: not any(server._senders for server in servers(learner)), "end of the sessions")


def test_a_child_that_dies_leaves_nothing_at_its_relay(
    closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.sync.stream.subscriber.PARENT_S", WAIT_S)
    learner = closing(Learner(LARGE, 1, CHAIN))
    parent = closing(Generator("parent", learner, learner.whole, CHAIN))
    learner.publish(0)
    parent.check(parent.fetch(-1, WAIT_S), 0)
    before = resources()
    for number in range(3):
        child = Generator(f"child-{number}", learner, learner.whole, CHAIN)
        staged = child.fetch(-1, WAIT_S)
        child.check(staged, 0)
        assert staged.source == "parent"
        child.subscriber._links[0].leave()  # at the learner: its successor takes from the same relay
        die(child, monkeypatch)
    freed(before)


def test_a_subscriber_that_never_enters_its_channel_holds_it_until_it_attaches_again(
    closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = closing(Learner(SMALL, 1, CONFIG))
    generator = closing(Generator("generator-0", learner, learner.whole, CONFIG))
    learner.publish(0)
    assert generator.subscriber.newest(-1, 0.0) is not None
    before = resources()
    with monkeypatch.context() as patch:
        patch.setattr("asyncrl.sync.stream.link.connect", lambda *offer: 1 / 0)
        for _ in range(5):
            with pytest.raises(ZeroDivisionError):
                generator.subscriber.stage(0)
    assert len(servers(learner)[0]._senders) == 1
    generator.check(generator.fetch(-1, WAIT_S), 0)
    generator.subscriber._links[0].drop()
    freed(before)


def test_every_rank_fences_a_subscriber_that_it_does_not_hear(closing: Callable) -> None:
    learner = closing(Learner(SMALL, 2, CONFIG))
    silent, lively = (closing(Generator(who, learner, learner.whole, CONFIG)) for who in ("silent", "lively"))
    learner.publish(0)
    for generator in (silent, lively):
        generator.check(generator.fetch(-1, WAIT_S), 0)
    for link in silent.subscriber._links:
        assert link.pin(0, 0.0)
    for server in servers(learner):
        for sender in server._senders.values():
            sender.seen_at -= CONFIG.silence_s + 1
    lively.subscriber.held(0)
    heard = [{s.who: s for s in server._senders.values()}["lively"] for server in servers(learner)]
    until(lambda: all(s.seen_at > time.monotonic() - CONFIG.silence_s for s in heard), "sign of life")
    learner.publish(1)
    for server in servers(learner):
        until(lambda server=server: [s.who for s in server._senders.values()] == ["lively"], "fence")
    assert all(publisher._source.wait_idle(WAIT_S) for publisher in learner.publishers)
    for generator in (lively, silent):  # the silent one wakes up, and attaches again
        generator.check(generator.fetch(0, WAIT_S), 1)


def test_a_version_that_is_held_twice_is_let_go_once(closing: Callable) -> None:
    """As after a transfer that broke before it began."""
    learner = closing(Learner(SMALL, 1, CONFIG))
    generator = closing(Generator("g", learner, learner.whole, CONFIG))
    learner.publish(0)
    generator.check(generator.fetch(-1, WAIT_S), 0)
    link = generator.subscriber._links[0]
    assert link.pin(0, 0.0)
    assert link.pin(0, 0.0)
    link.unpin()
    assert learner.publishers[0]._source.wait_idle(5.0)


def test_a_child_without_a_new_version_is_not_silent_at_its_relay(
    closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.sync.stream.subscriber.PARENT_S", WAIT_S)
    learner = closing(Learner(LARGE, 1, CHAIN))
    parent, child = (closing(Generator(who, learner, learner.whole, CHAIN)) for who in ("parent", "child"))
    for generator in (parent, child):
        assert generator.subscriber.newest(-1, 0.0) is None
    learner.publish(0)
    for generator in (parent, child):
        generator.check(generator.fetch(-1, WAIT_S), 0)
    (session,) = parent.relay.server._senders.values()
    session.seen_at -= CHAIN.silence_s + 1
    silent_since = session.seen_at
    child.subscriber.held(0)
    until(lambda: session.seen_at > silent_since, "sign of life")


def test_a_member_in_the_middle_of_a_transfer_is_not_silent(closing: Callable) -> None:
    learner = closing(Learner(SMALL, 1, CONFIG))
    generator = closing(Generator("g", learner, learner.whole, CONFIG))
    learner.publish(0)
    generator.check(generator.fetch(-1, WAIT_S), 0)
    publisher = learner.publishers[0]
    publisher._members._entries["g"].seen_at -= CONFIG.silence_s + 1
    assert generator.subscriber._links[0].pin(0, 0.0), "a request of its session, none of its membership"
    learner.publish(1)
    assert generator.subscriber._links[0].newest(0, WAIT_S) == 1
    assert publisher.stats()["fenced"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_hundred_killed_subscribers_leave_nothing(backend: str, closing: Callable) -> None:
    config = replace(LARGE_CONFIG, backend=backend)  # type: ignore[arg-type]
    learner = closing(Learner(LARGE, 2, config))
    learner.publish(0)
    layout = {
        name: [p.shape, p.dtype, [[b.offsets, b.shape] for b in p.boxes]] for name, p in learner.whole.items()
    }
    with started(SUBSCRIBER, "first", "[]"):
        pass  # the process that all others are forked from stays
    rng, before = random.Random(0), resources()
    for round_ in range(20):
        with ExitStack() as stack:
            victims = []
            for number in range(5):
                buckets = rng.choice([0, 1, 5, 100])  # 100: after the whole version, idle
                said = json.dumps([learner.endpoints, layout, config.bucket_mb, backend, buckets])
                who = f"victim-{round_}-{number}"
                victims.append(stack.enter_context(started(SUBSCRIBER, who, said)))
            for victim in victims:
                assert victim.stdout is not None
                assert any(line.startswith("here") for line in victim.stdout)
                victim.kill()
        learner.publish(round_ + 1)
        until(lambda: not any(publisher.stats()["subscribers"] for publisher in learner.publishers), "end")
    del victims, victim, stack
    freed(before)
    other = closing(Generator("other", learner, learner.whole, config))
    other.check(other.fetch(-1, WAIT_S), 20)
