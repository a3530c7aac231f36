"""Publishers and subscribers over real sockets and gloo: threads here, and a process that is killed."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import pytest
import torch
import zmq
from processes import until
from stream_cases import CONFIG, LARGE, LARGE_CONFIG, SMALL, Generator, Learner, closing_all

import asyncrl.sync.stream.link as link_module
from asyncrl.config.schema import SyncConfig
from asyncrl.errors import DeadlineError, RefusedError, WeightSyncError
from asyncrl.rpc.message import PROTOCOL, SEAL, sealed
from asyncrl.rpc.server import RpcServer
from asyncrl.sync.channels.channel import Channel
from asyncrl.sync.layout.layout import Box, ParamLayout
from asyncrl.sync.stream.publisher import SnapshotSource
from asyncrl.sync.stream.sender import Sender
from asyncrl.sync.stream.snapshot import Pin, SnapshotEvictedError
from asyncrl.sync.tensors.shards import Shards

closing = pytest.fixture(closing_all)


@pytest.mark.parametrize("world", [1, 2])
def test_versions_arrive_whole_at_generators_of_different_layouts(world: int, closing: Callable) -> None:
    learner = closing(Learner(SMALL, world, CONFIG))
    columns = {
        name: ParamLayout(shape, dtype, (Box.whole((*shape[:-1], 4)),))
        for name, (shape, dtype) in SMALL.items()
    }
    generators = [
        closing(Generator("generator-0", learner, learner.whole, CONFIG)),
        closing(Generator("generator-1", learner, columns, CONFIG)),
    ]
    learner.publish(0)
    for generator in generators:
        generator.check(generator.fetch(-1, 10.0), 0)
        assert generator.fetch(0, 0.0) is None, "nothing newer"
    learner.publish(1)
    generators[0].check(generators[0].fetch(0, 10.0), 1)
    learner.publish(2)
    learner.publish(5)
    for generator, held in zip(generators, (1, 0), strict=True):
        generator.check(generator.fetch(held, 10.0), 5)
    assert all(publisher.stats()["failures"] == 0 for publisher in learner.publishers)


def test_a_snapshot_does_not_change_while_the_learner_trains_on(closing: Callable) -> None:
    learner = closing(Learner(SMALL, 1, CONFIG))
    generator = closing(Generator("generator-0", learner, learner.whole, CONFIG))
    (report,) = learner.publish(3)
    learner.train(4)
    generator.check(generator.fetch(-1, 10.0), 3)
    assert report.bytes == 30 * 8 * 4 + 8 * 4 + 12 * 8 * 2
    assert report.pause_s > 0
    assert report.floor_s > 0
    with pytest.raises(WeightSyncError, match="version 3 published after version 3"):
        learner.publish(3)


def test_a_waiting_generator_is_woken_and_waits_for_the_slower_rank(
    closing: Callable, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = closing(Learner(SMALL, 2, CONFIG))
    generator = closing(Generator("generator-0", learner, learner.whole, CONFIG))
    parked = [threading.Event() for _ in learner.publishers]
    for publisher, event in zip(learner.publishers, parked, strict=True):

        def park(
            *request: object, server: RpcServer = publisher._server.server, event: threading.Event = event
        ) -> None:
            RpcServer.park(server, *request)  # type: ignore[arg-type]
            event.set()

        monkeypatch.setattr(publisher._server.server, "park", park)
    learner.train(0)
    fetched = threads.submit(generator.fetch, -1, 20.0)
    for event, publisher in zip(parked, learner.publishers, strict=True):
        assert event.wait(20.0), "first rank 0 for a newest version, then rank 1 for its snapshot of it"
        publisher.publish(0)
    generator.check(fetched.result(20.0), 0)


def test_a_rank_that_is_already_past_the_version_makes_it_start_over(
    closing: Callable, threads: ThreadPoolExecutor
) -> None:
    learner = closing(Learner(SMALL, 2, CONFIG))
    generator = closing(Generator("generator-0", learner, learner.whole, CONFIG))
    learner.publish(0)
    for version in (1, 2):
        learner.train(version)
        learner.publishers[1].publish(version)
    fetched = threads.submit(generator.fetch, -1, 20.0)
    learner.publishers[0].publish(2)
    generator.check(fetched.result(20.0), 2)


class Gate:
    """Holds back the first receive of each generator until `open`; `entered` says who has come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self.entered = {who: threading.Event() for who in ("a", "b")}
        self.open = threading.Event()
        self._receive = link_module.receive_buckets
        monkeypatch.setattr(link_module, "receive_buckets", self)

    def __call__(self, source, shards, channel, *more) -> None:  # type: ignore[no-untyped-def]
        with self._lock:
            first = not self.entered[channel.who].is_set()
            self.entered[channel.who].set()
        if first:
            assert self.open.wait(20.0)
        self._receive(source, shards, channel, *more)


def test_publish_waits_for_no_generator_and_takes_the_younger_snapshot_back(
    closing: Callable, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    learner = closing(Learner(LARGE, 1, LARGE_CONFIG))
    a, b = (closing(Generator(who, learner, learner.whole, LARGE_CONFIG)) for who in ("a", "b"))
    learner.publish(0)
    a_fetched = threads.submit(a.fetch, -1, 20.0)
    assert gate.entered["a"].wait(20.0)
    learner.publish(1)
    b_fetched = threads.submit(b.fetch, -1, 20.0)
    assert gate.entered["b"].wait(20.0)
    learner.publish(2)  # returns, though both snapshots are being read
    gate.open.set()
    a.check(a_fetched.result(20.0), 0)
    b.check(b_fetched.result(20.0), 2)
    assert learner.publishers[0].stats()["taken_back"] == 1


CHILD = """
import json, sys, torch
import asyncrl.sync.stream.link as link
from asyncrl.config.schema import (SyncConfig)
from asyncrl.sync.tensors.bucket import bucket_views
from asyncrl.sync.tensors.shards import Shards
from asyncrl.sync.layout.layout import from_wire
from asyncrl.sync.stream.subscriber import Subscriber

def receive_one_bucket_and_hang(source, shards, channel, *more):
    channel.recv_parts(bucket_views(source.buckets[0], shards)).wait(20.0)
    print("mid-transfer", flush=True)
    sys.stdin.read()

link.receive_buckets = receive_one_bucket_and_hang
endpoints, layout, bucket_mb = json.loads(sys.argv[1])
layout = from_wire(layout)
staging = {name: torch.zeros(param.shape) for name, param in layout.items()}
victim = Subscriber("victim", endpoints, Shards(layout, staging), SyncConfig(bucket_mb=bucket_mb), 1)
victim.stage(victim.newest(-1, 20.0))
"""


@pytest.mark.slow
def test_a_generator_killed_in_the_middle_disturbs_nobody_and_may_join_again(closing: Callable) -> None:
    learner = closing(Learner(LARGE, 2, LARGE_CONFIG))
    other = closing(Generator("other", learner, learner.whole, LARGE_CONFIG))
    learner.publish(0)
    layout = {
        name: [p.shape, p.dtype, [[b.offsets, b.shape] for b in p.boxes]] for name, p in learner.whole.items()
    }
    spec = json.dumps([learner.endpoints, layout, LARGE_CONFIG.bucket_mb])
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, spec], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as victim:
        try:
            assert victim.stdout is not None
            assert victim.stdout.readline().startswith("mid-transfer")
            learner.publish(1)
            other.check(other.fetch(-1, 20.0), 1)
        finally:
            victim.kill()
    for version in (2, 3):
        learner.publish(version)
        other.check(other.fetch(version - 1, 20.0), version)
    again = closing(Generator("again", learner, learner.whole, LARGE_CONFIG))
    again.check(again.fetch(-1, 20.0), 3)
    learner.close()  # waits until the killed one's snapshots are free
    assert [publisher.stats()["failures"] for publisher in learner.publishers] == [1, 1]


def test_a_wrong_byte_in_live_parameters_is_found(closing: Callable) -> None:
    learner = closing(Learner(SMALL, 2, CONFIG))
    generator = closing(Generator("generator-0", learner, learner.whole, CONFIG))
    learner.publish(0)
    staged = generator.fetch(-1, 10.0)
    generator.check(staged, 0)
    assert staged is not None
    assert staged.checksum is not None
    generator.staging["head"][0].view(torch.uint8)[7, 3] += 1
    with pytest.raises(WeightSyncError, match="the engine's do not hash to"):
        staged.checksum.check(Shards(generator.layout, generator.staging), "the engine's")


def test_without_verify_there_is_no_proof(closing: Callable) -> None:
    config = SyncConfig(bucket_mb=0.0005, deadline_s=20.0, verify=False)
    learner = closing(Learner(SMALL, 2, config))
    generator = closing(Generator("generator-0", learner, learner.whole, config))
    learner.publish(0)
    staged = generator.fetch(-1, 10.0)
    assert staged is not None
    assert staged.checksum is None


def test_another_lineage_is_refused_by_name(closing: Callable) -> None:
    learner = closing(Learner(SMALL, 1, CONFIG, lineage=2))
    generator = closing(Generator("generator-0", learner, learner.whole, CONFIG, lineage=1))
    with pytest.raises(
        RefusedError, match="generator-0 follows lineage 1, learner rank 0 publishes lineage 2"
    ):
        generator.fetch(-1, 1.0)


def test_ranks_of_two_lineages_are_refused_by_name(closing: Callable) -> None:
    """The endpoints of a learner that was started again, and one that is left of the learner before."""
    before, learner = (closing(Learner(SMALL, 2, CONFIG, lineage=lineage)) for lineage in (1, 2))
    learner.endpoints = [learner.endpoints[0], before.endpoints[1]]
    generator = closing(Generator("generator-0", learner, learner.whole, CONFIG))
    with pytest.raises(
        RefusedError, match="generator-0 follows lineage 2, learner rank 1 publishes lineage 1"
    ):
        generator.fetch(-1, 1.0)


def test_what_cannot_be_planned_is_named_before_anything_moves(closing: Callable) -> None:
    learner = closing(Learner(SMALL, 2, CONFIG))
    learner.endpoints = learner.endpoints[:1]
    one_rank_missing = closing(Generator("generator-0", learner, learner.whole, CONFIG))
    with pytest.raises(WeightSyncError, match=r"a learner of 2 ranks, but endpoints of ranks \[0\]"):
        one_rank_missing.fetch(-1, 1.0)
    with pytest.raises(WeightSyncError, match="parameter embed: the tensor is"):
        Shards(learner.whole, {"embed": torch.zeros(3)})


def test_a_publisher_that_does_not_answer_is_named(
    closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "GRACE_S", 0.2)
    learner = closing(Learner(SMALL, 1, CONFIG))
    generator = closing(Generator("generator-0", learner, learner.whole, CONFIG))
    learner.publish(0)
    generator.check(generator.fetch(-1, 5.0), 0)
    learner.close()
    with pytest.raises(
        WeightSyncError, match=f"generator-0 has lost the publisher at {learner.endpoints[0]}: it has ended"
    ):
        generator.fetch(0, 5.0)
    with pytest.raises(DeadlineError, match=f"generator-0 waited .* publisher at {learner.endpoints[0]}"):
        generator.fetch(0, 0.1)


def test_a_hash_that_does_not_come_is_named_with_its_version(
    closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, hashed, waits = threading.Event(), Sender._hashed, list[float]()

    def without_patience(sender: Sender, hashing: Any, pin: Pin, seconds: float) -> Any:
        waits.append(seconds)
        return hashed(sender, hashing, pin, 0.0)

    monkeypatch.setattr(SnapshotSource, "share", lambda *of: over.wait(60.0))
    monkeypatch.setattr(Sender, "_hashed", without_patience)
    learner = closing(Learner(SMALL, 1, CONFIG))
    generator = closing(Generator("g", learner, learner.whole, CONFIG))
    learner.publish(7)
    with pytest.raises(
        WeightSyncError,
        match=r"version 7 was not sent by .*learner rank 0 waited .* for its own thread: the hash of version 7",
    ):
        generator.subscriber.stage(7)
    over.set()
    assert 0 < waits[0] <= CONFIG.deadline_s


def test_a_wait_for_changes_leaves_half_of_the_time_for_the_whole_version(
    closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []
    monkeypatch.setattr(SnapshotSource, "deltas", lambda *of: waits.append(of[-1]))
    learner = closing(Learner(SMALL, 1, CONFIG))
    generator = closing(Generator("g", learner, learner.whole, CONFIG))
    learner.publish(0)
    generator.check(generator.fetch(-1, 20.0), 0)
    assert 0 < waits[0] <= CONFIG.deadline_s / 2


def test_all_buckets_of_a_version_share_one_deadline(
    closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[float] = []
    receive = link_module.receive_buckets

    def noted(source: Any, staging: Any, channel: Any, buffers: Any, seconds_left: Any, arrived: Any) -> None:
        left.append(seconds_left())
        receive(source, staging, channel, buffers, seconds_left, arrived)
        left.append(seconds_left())

    monkeypatch.setattr(link_module, "receive_buckets", noted)
    learner = closing(Learner(LARGE, 1, LARGE_CONFIG))
    generator = closing(Generator("g", learner, learner.whole, LARGE_CONFIG))
    learner.publish(0)
    generator.check(generator.fetch(-1, 20.0), 0)
    assert left[1] < left[0] <= LARGE_CONFIG.deadline_s


def test_a_version_that_goes_while_it_is_hashed_is_not_acknowledged(
    closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its bytes have left by then."""
    gone, hashed = threading.Event(), Sender._hashed

    def evicted(sender: Sender, *of: Any) -> Any:
        share = hashed(sender, *of)
        gone.set()
        return share

    def moved(source: SnapshotSource, pin: Pin) -> None:
        if gone.is_set():
            raise SnapshotEvictedError("a newer one needed the memory")

    monkeypatch.setattr(Sender, "_hashed", evicted)
    monkeypatch.setattr(SnapshotSource, "moved", moved)
    learner = closing(Learner(SMALL, 1, CONFIG))
    generator = closing(Generator("g", learner, learner.whole, CONFIG))
    learner.publish(0)
    assert generator.subscriber.newest(-1, 20.0) == 0
    with pytest.raises(SnapshotEvictedError, match="a newer one needed the memory"):
        generator.subscriber.stage(0)


def test_a_break_is_named_with_its_version_at_both_ends(
    closing: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(source: object, shards: object, channel: Channel, *more: object) -> None:
        channel.close()
        raise WeightSyncError("cut off")

    monkeypatch.setattr(link_module, "receive_buckets", broken)
    learner = closing(Learner(LARGE, 1, LARGE_CONFIG))
    generator = closing(Generator("g", learner, learner.whole, LARGE_CONFIG))
    learner.publish(3)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(WeightSyncError, match=r"version 3 .*learner rank 0"),
    ):
        generator.subscriber.stage(3)
    noted = "weights to g: version 3: learner rank 0: the channel to g broke"
    until(lambda: noted in caplog.text, "the learner's warning")


FAR_PLAN = [[["embed", [0, 0], [99, 8], 0]]]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        sealed(msgpack.packb([99, 1, "hello", {}])),
        sealed(msgpack.packb([PROTOCOL, 1, "hello", []])),
        sealed(msgpack.packb([PROTOCOL, 1, "hello", {"lineage": 1}])),
        sealed(msgpack.packb([PROTOCOL, 1, "hello", {"lineage": 1, "who": "g" * 257}])),
        sealed(msgpack.packb([PROTOCOL, 1, "newest", {"lineage": 1, "newer_than": "x", "wait_s": 0}])),
        sealed(msgpack.packb([PROTOCOL, 1, "attach", {"lineage": 1, "who": "g", "plan": FAR_PLAN}])),
        sealed(msgpack.packb([PROTOCOL, 1, "hello", {"lineage": 1, "who": "g"}]))[:-1] + b"h",
    ],
)
def test_a_malformed_message_is_answered_and_counted(frame: bytes, closing: Callable) -> None:
    learner = closing(Learner(SMALL, 1, CONFIG))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(learner.endpoints[0])
        dealer.send(frame)
        assert dealer.poll(10_000)
        _, _, verdict, fields = msgpack.unpackb(dealer.recv()[SEAL.size :])
    assert (verdict, fields["reason"]) == ("error", "malformed")
    assert learner.publishers[0].stats()["malformed"] == 1
    generator = closing(Generator("generator-0", learner, learner.whole, CONFIG))
    learner.publish(0)
    generator.check(generator.fetch(-1, 10.0), 0)


def test_the_trace_has_each_copy_and_each_transfer(closing: Callable, trace: Callable) -> None:
    learner = closing(Learner(SMALL, 1, CONFIG))
    generator = closing(Generator("generator-0", learner, learner.whole, CONFIG))
    for version in (0, 1):
        learner.publish(version)
        generator.check(generator.fetch(version - 1, 10.0), version)
    until(lambda: len(spans_of(trace(), "send")) == 2, "two transfers")
    size = sum(tensor.nbytes for tensor in learner.at(0).values())
    about = [{"version": version, "generator": "generator-0", "bytes": size} for version in (0, 1)]
    assert spans_of(trace(), "send") == about
    assert spans_of(trace(), "snapshot") == [{"version": version, "bytes": size} for version in (0, 1)]
    (joined,) = [event for event in trace().events if event.name == "subscribed"]
    assert joined.about == {"generator": "generator-0"}


def spans_of(trace: Any, name: str) -> list[dict[str, Any]]:
    return [
        span.about for span in trace.lanes["weights"].spans if span.name == name and span.end >= span.start
    ]
