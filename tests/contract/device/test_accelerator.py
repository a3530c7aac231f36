"""`asyncrl/device/accelerator.py` over the CPU and over an accelerator that records what is called."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgpack
import pytest
import torch
from fake_accelerator import FakeAccelerator

from asyncrl.device import accelerator
from asyncrl.device.streams import SideStream
from asyncrl.errors import WeightSyncError


@pytest.fixture(params=["cpu", "cuda", "xpu"])
def fake(request: pytest.FixtureRequest) -> Iterator[FakeAccelerator]:
    """With two devices; "cpu": with none."""
    devices = 0 if request.param == "cpu" else 2
    with FakeAccelerator(devices, "cuda" if request.param == "cpu" else request.param) as installed:
        yield installed


def last(fake: FakeAccelerator) -> torch.device:
    return accelerator.use_numbered(1)


def test_a_number_is_a_device_and_becomes_current(fake: FakeAccelerator) -> None:
    device = last(fake)
    assert device == (torch.device(fake.kind, 1) if fake.devices else accelerator.CPU)
    assert accelerator.current_device() == device
    assert accelerator.is_accelerator(device) == (accelerator.kind() != "cpu")
    assert accelerator.count() == fake.devices


def test_only_an_accelerator_is_waited_for(fake: FakeAccelerator) -> None:
    device = last(fake)
    fake.calls.clear()
    accelerator.wait_for_stream(device)
    accelerator.wait_for_device(device)
    assert fake.calls == (["stream 0 synchronize", "device 1 synchronize"] if fake.devices else [])


def test_each_thread_begins_with_the_first_device(fake: FakeAccelerator) -> None:
    device, seen = last(fake), []
    thread = threading.Thread(target=lambda: seen.append(accelerator.current_device()))
    thread.start()
    thread.join()
    assert seen == [torch.device(fake.kind, 0) if fake.devices else accelerator.CPU]
    assert accelerator.current_device() == device


def test_a_device_has_a_name_a_peak_and_a_backend(fake: FakeAccelerator) -> None:
    device = last(fake)
    assert accelerator.name(device)
    assert accelerator.peak_memory_bytes(device) > 0
    backends = dict(
        part.split(":") for part in accelerator.collective_backends(device).split(",") if ":" in part
    )
    assert set(backends) == ({"cpu", fake.kind} if fake.devices else set())
    if fake.devices:
        free, total = accelerator.memory_bytes(device)
        assert 0 < free <= total
        assert "device 1 resets its peak" in fake.calls


def test_a_share_of_the_memory_is_the_limit(fake: FakeAccelerator) -> None:
    device = last(fake)
    fake.calls.clear()
    accelerator.limit_memory(device, 1.0)
    assert fake.calls == []
    accelerator.limit_memory(device, 0.4)
    assert fake.calls == (["device 1 has a share of 0.4"] if fake.devices else [])


def test_a_thread_that_enters_a_stream_works_on_its_device(fake: FakeAccelerator) -> None:
    stream, seen = SideStream(last(fake)), []

    def work() -> None:
        with stream.entered() as entered:
            seen.append((accelerator.current_device(), entered))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ((device, entered),) = seen
    assert device == (torch.device(fake.kind, 1) if fake.devices else accelerator.CPU)
    assert (entered is None) == (fake.devices == 0)
    assert fake.devices == 0 or entered.number > 0


def test_the_memory_of_another_process_is_opened_on_the_device_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = []

    def on_device(index: int, *handle: object) -> None:
        opened.append((index, handle))
        raise RuntimeError("there is no GPU")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", on_device)
    with FakeAccelerator(2):
        with pytest.raises(RuntimeError, match="no GPU"):
            accelerator.opened_memory(msgpack.packb(["fake-1", 7, b"handle"]), 8)
        with pytest.raises(WeightSyncError, match="GPU fake-2 cannot be seen from this process"):
            accelerator.opened_memory(msgpack.packb(["fake-2", 7, b"handle"]), 8)
    assert opened == [(1, (7, b"handle"))]


def test_memory_is_shared_on_cuda_alone(fake: FakeAccelerator) -> None:
    device = last(fake)
    shares = accelerator.shares_memory(device)
    assert shares == (accelerator.kind() == "cuda")
    names = accelerator.unique_names()
    assert len(set(names)) == (fake.devices if shares else 0)
    if shares:
        assert accelerator.unique_name(device) == names[1]
