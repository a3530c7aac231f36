"""Whole versions from learner rank 0 to the ranks of engines, which are threads here and take them as vLLM's do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import pytest
import torch
from sharding import same_bits
from stream_cases import CONFIG, SMALL, Learner

from asyncrl.errors import DeadlineError, WeightSyncError
from asyncrl.sync.broadcast import broadcaster
from asyncrl.sync.broadcast.communicator import ID_BYTES, GlooCommunicator
from asyncrl.sync.broadcast.stream import BroadcastSubscriber, Offer
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.sync.tensors.shards import Shards

CONFIG = replace(CONFIG, backend="vllm")
RANKS = 2


@dataclass
class Engine:
    subscriber: BroadcastSubscriber

    def turn(self, version: int) -> Offer:
        return self.subscriber.turn(version, RANKS)

    def take(self, version: int) -> list[dict[str, torch.Tensor]]:
        """What each rank has received."""
        offer = self.turn(version)
        with offer.joined, ThreadPoolExecutor(RANKS) as threads:
            return list(threads.map(lambda rank: received(offer, rank), range(1, RANKS + 1)))


def received(offer: Offer, rank: int) -> dict[str, torch.Tensor]:
    """By vLLM's rule: a message ends with the parameter by which it is longer than the bucket."""
    group = GlooCommunicator.from_unique_id_bytes(offer.group, rank, RANKS + 1, 0)
    tensors: dict[str, torch.Tensor] = {}
    waiting: list[tuple[str, torch.Tensor]] = []

    def message() -> None:
        whole = torch.empty(sum(into.nbytes for _, into in waiting), dtype=torch.uint8)
        group.broadcast(whole, 0)
        parts = whole.split([into.nbytes for _, into in waiting])
        for (name, into), part in zip(waiting, parts, strict=True):
            tensors[name] = part.view(into.dtype).view(into.shape)
        waiting.clear()

    for name, dtype, shape in offer.params:
        waiting.append((name, torch.empty(shape, dtype=getattr(torch, dtype))))
        if sum(into.nbytes for _, into in waiting) > offer.bucket_bytes:
            message()
    if waiting:
        message()
    return tensors


@pytest.fixture
def engine_of() -> Iterator[Callable[[str, Learner], Engine]]:
    with ExitStack() as stack:

        def make(who: str, learner: Learner) -> Engine:
            of = BroadcastSubscriber(who, learner.endpoints, Shards({}, {}), CONFIG, learner.lineage)
            stack.callback(of.close)
            return Engine(of)

        yield make


@pytest.fixture
def learner() -> Iterator[Learner]:
    made = Learner(SMALL, 2, CONFIG)
    yield made
    made.close()


def check(learner: Learner, version: int, tensors: dict[str, torch.Tensor]) -> None:
    expected = learner.at(version)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert same_bits(tensor, expected[name]), name


def test_each_rank_of_each_engine_gets_every_version_whole(
    learner: Learner, engine_of: Callable[[str, Learner], Engine]
) -> None:
    engines = [engine_of("a", learner), engine_of("b", learner)]
    for version in range(3):
        learner.publish(version)
        with ThreadPoolExecutor(2) as threads:
            for ranks in threads.map(lambda engine, at=version: engine.take(at), engines):
                for tensors in ranks:
                    check(learner, version, tensors)


def test_a_version_that_is_gone_is_refused(
    learner: Learner, engine_of: Callable[[str, Learner], Engine]
) -> None:
    engine = engine_of("a", learner)
    for version in range(3):
        learner.publish(version)
    with pytest.raises(SnapshotEvictedError, match="version 0"):
        engine.take(0)
    check(learner, 2, engine.take(2)[0])


class Stuck:
    """As NCCL between a learner and an engine that is gone: it waits until it is aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert self.aborted.wait(60)
        raise RuntimeError("aborted")

    def destroy(self) -> None:
        self.aborted.set()


@pytest.mark.parametrize("at", ["join", "broadcast"])
def test_an_engine_that_dies_in_its_turn_ends_that_turn_alone(
    at: str,
    learner: Learner,
    engine_of: Callable[[str, Learner], Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(broadcaster, "GRACE_S", 0.0)
    group, waits, never = Stuck(), threading.Event(), threading.Event()

    def join(world: int) -> Stuck:
        waits.set()
        if at == "join":
            never.wait(60)
        return group

    learner.publish(0)
    dying, other = engine_of("dying", learner), engine_of("other", learner)
    with monkeypatch.context() as patch:
        patch.setattr(broadcaster, "new_group", lambda *_: (b"\0" * ID_BYTES, join))
        offer = dying.turn(0)
        assert waits.wait(60)
    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(other.take, 0)
        learner.publish(1)  # waits for nobody
        assert not taking.done()
        offer.joined.close()  # as the kernel does for a process that was killed
        check(learner, 0, taking.result(60)[0])
    never.set()
    assert group.aborted.wait(60)
    ended(0, "dying")
    assert "dying hung up before it had version 0" in caplog.text
    assert learner.publishers[0].stats()["failures"] == 1


def test_an_engine_that_stands_still_is_named_at_the_deadline(
    engine_of: Callable[[str, Learner], Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = Stuck()
    monkeypatch.setattr(broadcaster, "new_group", lambda *_: (b"\0" * ID_BYTES, lambda world: group))
    learner = Learner(SMALL, 1, replace(CONFIG, deadline_s=0.5))
    try:
        learner.publish(0)
        offer = engine_of("sleeping", learner).turn(0)
        ended(0, "sleeping")
        assert not offer.stands
        assert "learner rank 0 waited 0.5 s for sleeping: its end of version 0 did not come" in caplog.text
        assert group.aborted.is_set()
        offer.joined.close()
    finally:
        learner.close()


def ended(version: int, who: str) -> None:
    for thread in threading.enumerate():
        if thread.name == f"version {version} to {who}":
            thread.join(60)


def test_a_learner_that_fails_in_a_turn_ends_it_with_an_error(
    learner: Learner, engine_of: Callable[[str, Learner], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("a", learner)
    learner.publish(0)

    def broken(shards: Shards, *_: object) -> Iterator[torch.Tensor]:
        yield torch.zeros(1, dtype=torch.uint8)
        raise OSError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(broadcaster, "chunks", broken)
        with pytest.raises(RuntimeError, match=r"(?i)connection"):  # and not that nothing came in time
            engine.take(0)
    check(learner, 0, engine.take(0)[1])


def test_a_group_that_cannot_be_made_is_an_error_at_the_engine(
    learner: Learner, engine_of: Callable[[str, Learner], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise ModuleNotFoundError("no NCCL")

    learner.publish(0)
    monkeypatch.setattr(broadcaster, "new_group", broken)
    with pytest.raises(WeightSyncError, match=r"a: version 0 was not sent by learner rank 0.*no NCCL"):
        engine_of("a", learner).take(0)


def test_a_learner_that_ends_finishes_the_turns_under_way(
    learner: Learner, engine_of: Callable[[str, Learner], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, midway, goes_on = broadcaster.chunks, threading.Event(), threading.Event()
    waits = broadcaster.Broadcaster.wait_idle

    def chunks(*of: Any) -> Iterator[torch.Tensor]:
        for chunk in whole(*of):
            yield chunk
            midway.set()
            assert goes_on.wait(60)

    def wait_idle(of: broadcaster.Broadcaster, seconds: float) -> None:
        goes_on.set()
        waits(of, seconds)

    monkeypatch.setattr(broadcaster, "chunks", chunks)
    monkeypatch.setattr(broadcaster.Broadcaster, "wait_idle", wait_idle)
    learner.publish(0)
    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(engine_of("a", learner).take, 0)
        assert midway.wait(60)
        learner.publishers[0].close(60)
        sent = learner.publishers[0].stats()["transfers"]
        goes_on.set()
        check(learner, 0, taking.result(60)[0])
    assert sent == 2, "to the copy, and to the engine"


def test_a_learner_that_stands_still_when_ranks_join_is_named_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = msgpack.packb(["secret", *silent.getsockname(), 0.1]).ljust(ID_BYTES, b"\0")
        with pytest.raises(DeadlineError, match=r"rank 2 waited 0.1 s for learner rank 0: "):
            GlooCommunicator.from_unique_id_bytes(place, 2, 3, 0)


def test_the_trace_has_each_turn_of_an_engine(
    learner: Learner, engine_of: Callable[[str, Learner], Engine], trace: Callable[[], Any]
) -> None:
    engine = engine_of("a", learner)
    learner.publish(0)
    engine.take(0)
    learner.close()
    (span,) = [span for span in trace().lanes["weights"].spans if span.name == "broadcast"]
    whole = sum(tensor.nbytes for tensor in learner.at(0).values())
    assert span.about == {"version": 0, "generator": "a", "bytes": RANKS * whole}
