"""On an accelerator, here a made-up one, nothing of the weight stream runs on the stream that training uses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_streams import DEFAULT, fake_nccl, fake_streams
from stream_cases import LARGE_CONFIG, SMALL, Generator, Learner, closing_all

from asyncrl.config.schema import SyncConfig
from asyncrl.device import accelerator
from asyncrl.device.streams import SideStream, StreamEvent
from asyncrl.sync.channels.shm_transport import ShmChannel
from asyncrl.sync.layout.layout import whole_layout
from asyncrl.sync.store.blobs import FolderBlobs
from asyncrl.sync.store.stored_publisher import StoredPublisher
from asyncrl.sync.store.stored_reader import StoredReader
from asyncrl.sync.store.stored_subscriber import StoredSubscriber
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
    for stream in module.on("unpack_bucket"):
        done = [
            what for what, on, _ in module.log if on == stream and what in ("unpack_bucket", "synchronize")
        ]
        assert done[-1] == "synchronize", "staging is whole when a version is"


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


def test_shared_memory_is_announced_and_given_back_once_it_was_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer reads it on a stream of its own, and may overwrite what it gets back."""
    module = fake_streams(monkeypatch)
    segments: list[torch.Tensor] = []

    def handle(data: torch.Tensor) -> bytes:
        segments.append(torch.empty(0, dtype=torch.uint8).set_(data.untyped_storage()))
        return bytes([len(segments)])

    monkeypatch.setattr(accelerator, "memory_handle", handle)
    monkeypatch.setattr(accelerator, "opened_memory", lambda handle, size: segments[handle[0] - 1][:size])
    for name in ("_announce", "_post"):
        monkeypatch.setattr(ShmChannel, name, module.logging(name, getattr(ShmChannel, name)))
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    source, target = (
        ShmChannel(end, *names, CPU) for end, names in zip(pair, [("A", "B"), ("B", "A")], strict=True)
    )
    with SideStream(CPU).entered():
        sent = source.send(torch.arange(8, dtype=torch.uint8))
    assert [what for what, _, _ in module.log] == ["synchronize", "_announce", "_post"]
    module.log.clear()
    into = torch.zeros(8, dtype=torch.uint8)
    with SideStream(CPU).entered():
        target.recv(into).wait(10.0)
    assert [what for what, _, _ in module.log] == ["copy", "synchronize", "_post"]
    sent.wait(10.0)
    assert into.tolist() == list(range(8))
    source.close()
    target.close()


def test_stored_versions_are_written_and_read_beside_training_and_decoding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = fake_streams(monkeypatch)
    for owner, name in ((StoredPublisher, "_store"), (StoredReader, "take_full")):
        monkeypatch.setattr(owner, name, module.logging(name, getattr(owner, name)))
    config = SyncConfig(backend="file", folder=str(tmp_path), delta="never", verify=False)
    live = {"w": torch.arange(6.0)}
    publisher = StoredPublisher(0, 1, Shards(layout_of(live), live), config, 1, FolderBlobs(tmp_path))
    publisher.publish(1)
    publisher.close(10.0)
    writing = module.on("_store")
    staging = Shards(layout_of(live), {"w": torch.zeros(6)})
    reader = StoredSubscriber("A", [publisher.endpoint], staging, config, 1, FolderBlobs(tmp_path))
    assert reader.newest(0, 10.0) == 1
    module.log.clear()
    reader.stage(1)
    (_, reading, _), (done, awaited, _) = module.log
    assert (done, awaited) == ("synchronize", reading)
    assert reading != DEFAULT
    assert staging.parts[0].tolist() == live["w"].tolist()
    assert len(writing) == 1
    assert DEFAULT not in writing


def test_a_stream_is_of_the_thread_that_entered_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_streams(monkeypatch)
    with SideStream(CPU).entered():
        other = threading.Thread(target=StreamEvent, args=(CPU,))
        other.start()
        other.join()
        StreamEvent(CPU)
    StreamEvent(CPU)
    assert module.on("record") == [DEFAULT, "stream 1", DEFAULT]


def test_on_the_cpu_streams_and_events_do_nothing() -> None:
    with SideStream(CPU).entered():
        StreamEvent(CPU).order()
