"""The streams of an accelerator that is made up: the CPU plays it, and does at once what is queued. What was put on
which stream, and which stream waited for what, is written down."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fake_nccl import Fabric, FakeGroup, Kernel, group_of

from asyncrl.device import accelerator
from asyncrl.sync.channels import nccl_transport
from asyncrl.sync.stream import publisher
from asyncrl.sync.tensors import bucket

DEFAULT = "default"


class FakeStreams:
    """As torch.cuda. log: (what, stream, of what)"""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, Any]] = []
        self.numbers = itertools.count(1)
        self.here = threading.local()
        module = self

        class Stream:
            def __init__(self, device: Any = None, name: str | None = None) -> None:
                self.name = name or f"stream {next(module.numbers)}"

            def synchronize(self) -> None:
                module.log.append(("synchronize", self.name, None))

        class Event:
            def record(self, stream: Any) -> None:
                module.log.append(("record", stream.name, self))

            def wait(self, stream: Any) -> None:
                module.log.append(("wait", stream.name, self))

        self.Stream, self.Event = Stream, Event
        self.default = Stream(name=DEFAULT)

    def current_stream(self, device: Any = None) -> Any:
        return getattr(self.here, "stream", self.default)

    def set_device(self, device: Any) -> None: ...

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 1 << 33, 1 << 34

    def synchronize(self, device: Any = None) -> None:
        self.log.append(("synchronize", "device", None))

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self.current_stream()
        self.here.stream = stream
        try:
            yield
        finally:
            self.here.stream = before

    def on(self, what: str) -> list[str]:
        """The streams that it was put on."""
        return [stream for kind, stream, _ in self.log if kind == what]

    def logging(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def logged(*args: Any, **more: Any) -> Any:
            self.log.append((what, self.current_stream().name, None))
            return function(*args, **more)

        return logged


def fake_streams(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    """The CPU is an accelerator from now on, of which no two processes share memory."""
    module = FakeStreams()
    monkeypatch.setattr(accelerator, "is_accelerator", lambda device: True)
    monkeypatch.setattr(accelerator, "shares_memory", lambda device: True)
    monkeypatch.setattr(accelerator, "unique_name", lambda device: "gpu")
    monkeypatch.setattr(accelerator, "unique_names", list)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    monkeypatch.setattr(torch, "_foreach_copy_", module.logging("copy", torch._foreach_copy_))
    for name in ("pack_bucket", "unpack_bucket"):
        monkeypatch.setattr(bucket, name, module.logging(name, getattr(bucket, name)))
    hashing = module.logging("hash", publisher.ChecksumShare.of)
    monkeypatch.setattr(publisher.ChecksumShare, "of", staticmethod(hashing))
    return module


def fake_nccl(monkeypatch: pytest.MonkeyPatch, module: FakeStreams) -> Fabric:
    """torch's NCCL groups are made up from now on; their kernels are written down as "send" and "recv"."""
    fabric = Fabric()

    class Group(FakeGroup):
        def _launch(self, verb: str, direction: int, data: torch.Tensor) -> Kernel:
            module.log.append((verb, module.current_stream().name, self.gpu))
            return super()._launch(verb, direction, data)

    monkeypatch.setattr(nccl_transport, "_new_group", lambda store, meeting: group_of(fabric, meeting, Group))
    return fabric
