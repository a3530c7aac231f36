"""On an accelerator, here a made-up one, nothing of the weight stream runs on the stream that training uses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from fake_streams import DEFAULT, fake_nccl, fake_streams
from stream_cases import LARGE_CONFIG, SMALL, Generator, Learner, closing_all

from asyncrl.device import accelerator
from asyncrl.device.streams import Event, SideStream
from asyncrl.sync.layout.layout import whole_layout
from asyncrl.sync.stream.relay import StagingSource
from asyncrl.sync.stream.snapshot import SnapshotMemory
from asyncrl.sync.tensors.shards import Shards, layout_of

CPU = torch.device("cpu")


@pytest.fixture
def closing() -> Iterator[Callable]:
    yield from closing_all()


def test_two_ranks_feed_two_generators_over_nccl_beside_training(
    monkeypatch: pytest.MonkeyPatch, closing: Callable
) -> None:
    module = fake_streams(monkeypatch)
    fabric = fake_nccl(monkeypatch, module)
    config = replace(LARGE_CONFIG, fanout=0)
    learner = closing(Learner(SMALL, 2, config))
    generators = [closing(Generator(f"generator-{n}", learner, whole_layout(SMALL), config)) for n in (0, 1)]
    module.log.clear()
    with ThreadPoolExecutor(2) as threads:
        for version in (1, 2):
            learner.publish(version)
            staged = list(threads.map(lambda one: one.fetch(version - 1, 10.0), generators))  # noqa: B023
            for generator, one in zip(generators, staged, strict=True):
                generator.check(one, version)
    assert fabric.circles == []
    assert fabric.aborted == []
    for what in ("copy", "pack_bucket", "unpack_bucket", "hash", "send", "recv"):
        assert module.on(what), f"nothing was logged of {what}"
        assert DEFAULT not in module.on(what)
    assert DEFAULT not in module.on("wait"), "training waits for no generator"
    assert not {DEFAULT, "device"} & set(module.on("synchronize"))


def test_a_snapshot_follows_what_training_has_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_streams(monkeypatch)
    live = {"w": torch.arange(6.0)}
    memory = SnapshotMemory(Shards(layout_of(live), live), 1)
    module.log.clear()
    memory.take(1)
    (recorded, training, event), (waits, own, awaited), copied, finished = module.log
    assert (recorded, training) == ("record", DEFAULT)
    assert (waits, awaited) == ("wait", event)
    assert copied[:2] == ("copy", own)
    assert finished[:2] == ("synchronize", own)
    assert own != DEFAULT


def test_a_snapshot_on_the_host_lies_in_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []

    def pinned_memory(size: int) -> torch.Tensor:
        pinned.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    live = {"w": torch.arange(6.0)}
    shards = Shards(layout_of(live), live)
    monkeypatch.setattr(accelerator, "pinned_memory", pinned_memory)
    SnapshotMemory(shards, 2, on_host=True)
    assert pinned == [], "the CPU's own shards are on the host already"
    fake_streams(monkeypatch)
    memory = SnapshotMemory(shards, 2, on_host=True)
    memory.take(1)
    pin = memory.pin(1, "generator-0")
    assert pin is not None
    assert torch.equal(memory.shards(pin).parts[0], live["w"])
    assert len(pinned) == 2


def test_a_relay_reads_a_bucket_after_it_was_unpacked_on_another_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = fake_streams(monkeypatch)
    live = {"w": torch.arange(6.0)}
    source = StagingSource("generator-0", Shards(layout_of(live), live), plan=None)  # type: ignore[arg-type]
    source.begin(1)
    pin = source.pin(1, "generator-1")
    assert pin is not None
    with SideStream(CPU).entered():
        source.arrived(0)
    sending = SideStream(CPU)
    with sending.entered():
        source.ready(pin, 0, 1.0)
    (recorded, unpacking, event), (waits, reading, awaited) = module.log
    assert (recorded, waits, awaited) == ("record", "wait", event)
    assert len({unpacking, reading, DEFAULT}) == 3


def test_a_stream_is_of_the_thread_that_entered_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_streams(monkeypatch)
    with SideStream(CPU).entered():
        other = threading.Thread(target=Event, args=(CPU,))
        other.start()
        other.join()
        Event(CPU)
    Event(CPU)
    assert module.on("record") == [DEFAULT, "stream 1", DEFAULT]


def test_on_the_cpu_streams_and_events_do_nothing() -> None:
    with SideStream(CPU).entered():
        Event(CPU).order()
