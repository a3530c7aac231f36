"""An accelerator for tests: torch's module of a device type, and `torch.accelerator`, that record what is called.

    with FakeAccelerator() as fake:
        accelerator.wait_for_stream(torch.device("cuda", 0))
        fake.calls     ──▸ ["stream 0 synchronize"]

A stream has a number; the default stream of each device has 0. The current stream and device are one thread's, as in
torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch


class FakeStream:
    """number: 0 for the default one of its device"""

    def __init__(self, fake: FakeAccelerator, number: int, device: torch.device) -> None:
        self._fake, self.number, self.device = fake, number, device

    def synchronize(self) -> None:
        self._fake.note(f"stream {self.number} synchronize")

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def wait_event(self, event: FakeEvent) -> None:
        self._fake.note(f"stream {self.number} waits for {event}")

    def wait_stream(self, stream: FakeStream) -> None:
        self._fake.note(f"stream {self.number} waits for stream {stream.number}")

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or self._fake.Event()
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and (self.number, self.device) == (other.number, other.device)

    def __hash__(self) -> int:
        return hash((self.number, self.device))


class FakeEvent:
    """stream: the one on which it was recorded last"""

    def __init__(self, fake: FakeAccelerator, number: int) -> None:
        self._fake, self.number = fake, number
        self.stream: FakeStream | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        self.stream = stream or self._fake.current_stream()
        self._fake.note(f"stream {self.stream.number} records event {self.number}")

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or self._fake.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self._fake.note(f"event {self.number} synchronize")

    def query(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"event {self.number}"


class FakeAccelerator:
    """See above. devices: how many there are · calls: each call that waits, records or chooses, in order"""

    def __init__(self, devices: int = 1, kind: str = "cuda") -> None:
        self.devices, self.kind, self.calls = devices, kind, list[str]()
        self._streams, self._events = count(1), count(1)
        self._here = threading.local()
        self._installed = ExitStack()

    # ---- as torch.cuda

    def Stream(self, device: Any = None, **_: Any) -> FakeStream:  # noqa: N802
        return FakeStream(self, next(self._streams), self._device(device))

    def Event(self, **_: Any) -> FakeEvent:  # noqa: N802
        return FakeEvent(self, next(self._events))

    @contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        before = getattr(self._here, "stream", None)
        self._here.stream = stream or before
        try:
            yield
        finally:
            self._here.stream = before

    def current_stream(self, device: Any = None) -> FakeStream:
        return getattr(self._here, "stream", None) or self.default_stream(device)

    def default_stream(self, device: Any = None) -> FakeStream:
        return FakeStream(self, 0, self._device(device))

    def set_stream(self, stream: FakeStream) -> None:
        self._here.stream = stream

    def set_device(self, device: Any) -> None:
        self._here.index = self._device(device).index
        self.note(f"device {self._here.index} is current")

    def current_device(self) -> int:
        return getattr(self._here, "index", 0)

    def device_count(self) -> int:
        return self.devices

    def is_available(self) -> bool:
        return self.devices > 0

    def is_initialized(self) -> bool:
        return True

    def synchronize(self, device: Any = None) -> None:
        self.note(f"device {self._device(device).index} synchronize")

    def get_device_name(self, device: Any = None) -> str:
        return "Fake"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"fake-{self._device(device).index}", total_memory=1 << 30)

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return 9, 0

    def max_memory_allocated(self, device: Any = None) -> int:
        return 1 << 20

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.note(f"device {self._device(device).index} resets its peak")

    def set_per_process_memory_fraction(self, share: float, device: Any = None) -> None:
        self.note(f"device {self._device(device).index} has a share of {share}")

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 1 << 29, 1 << 30

    # ---- in its place

    def __enter__(self) -> FakeAccelerator:
        real = torch.get_device_module

        def module_of(device: Any = None) -> Any:
            wanted = self.kind if device is None else torch.device(device).type
            return self if wanted == self.kind else real(device)

        current = torch.device(self.kind) if self.devices else None
        for name, value in (
            ("device_count", self.device_count),
            ("is_available", self.is_available),
            ("current_accelerator", lambda check_available=False: current),
            ("current_device_index", self.current_device),
            ("current_stream", self.current_stream),
        ):
            self._installed.enter_context(patch.object(torch.accelerator, name, value))
        self._installed.enter_context(patch.object(torch, "get_device_module", module_of))
        return self

    def __exit__(self, *error: Any) -> None:
        self._installed.close()

    def note(self, call: str) -> None:
        self.calls.append(call)

    def _device(self, device: Any) -> torch.device:
        if device is None:
            return torch.device(self.kind, self.current_device())
        if isinstance(device, int):
            return torch.device(self.kind, device)
        device = torch.device(device)
        return torch.device(self.kind, self.current_device() if device.index is None else device.index)
