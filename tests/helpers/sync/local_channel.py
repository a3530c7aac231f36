"""A channel within one process: slow, simple, and the one that the others are compared with."""

from __future__ import annotations

import queue
from dataclasses import dataclass

import torch

from asyncrl.sync.channels.channel import ChannelEnd, Transfer, named


class _Pipe:
    """One direction of a local channel."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self.messages.put(None)


@dataclass(frozen=True, slots=True)
class _LocalRecv:
    channel: LocalChannel
    into: torch.Tensor

    def wait(self, seconds: float) -> None:
        channel = self.channel
        try:
            message = channel.inward.messages.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise channel.late(named("recv", self.into), seconds) from None
        if message is None:
            channel.inward.close()  # for the transfers after this one
            raise channel.breaks(f"{channel.whom} closed it")
        if message.numel() != self.into.numel():
            raise channel.breaks(f"{message.numel()} bytes came where {self.into.numel()} were expected")
        self.into.copy_(message)


class _Done:
    def wait(self, seconds: float) -> None:
        """A local send copies at once."""


class LocalChannel(ChannelEnd):
    """One end of a pair in one process; `send` copies, so it never waits."""

    def __init__(self, who: str, whom: str, inward: _Pipe, outward: _Pipe) -> None:
        super().__init__(who, whom, torch.device("cpu"))
        self.inward, self.outward = inward, outward

    def send(self, data: torch.Tensor) -> Transfer:
        self.check()
        if self.outward.closed:
            raise self.breaks(f"{self.whom} closed it")
        self.outward.messages.put(data.clone())
        return _Done()

    def recv(self, into: torch.Tensor) -> Transfer:
        self.check()
        return _LocalRecv(self, into)

    def close(self) -> None:
        self.ends()
        self.inward.close()
        self.outward.close()


def local_channels(source: str, target: str) -> tuple[LocalChannel, LocalChannel]:
    """Both ends, named `source` and `target`."""
    there, back = _Pipe(), _Pipe()
    return LocalChannel(source, target, back, there), LocalChannel(target, source, there, back)
