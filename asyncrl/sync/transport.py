"""The seam between the weight stream and what carries its bytes.

A `Channel` joins one learner rank and one generator. Bytes arrive in the order they were sent; sizes are
known to both ends beforehand. A channel that raised is dead: close it and make another.

`local_channels` is the golden implementation: slow, in one process, and the one that the others are compared
with.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncrl.errors import DeadlineError, WeightSyncError


class Transfer(Protocol):
    """One buffer on its way. The buffer must stay as it is until `wait` returns."""

    def wait(self, seconds: float) -> None:
        """Raises DeadlineError after `seconds`, WeightSyncError for a broken channel; both name both ends."""


class Channel(Protocol):
    device: torch.device  # where the bytes must lie

    def send(self, data: torch.Tensor) -> Transfer:
        """Begin to send [bytes] uint8, contiguous. Raises WeightSyncError when the channel is broken."""

    def recv(self, into: torch.Tensor) -> Transfer:
        """Begin to fill [bytes] uint8, contiguous. Raises WeightSyncError when the channel is broken."""

    def close(self) -> None:
        """Free it; the other end's transfers then fail. May be called again, and from another thread."""


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
            what = f"recv of {self.into.numel()} bytes of weights"
            raise DeadlineError(channel.who, channel.whom, what, seconds) from None
        if message is None:
            channel.inward.close()  # for the transfers after this one
            raise WeightSyncError(f"{channel.who}: {channel.whom} closed the channel")
        self.into.copy_(message)


class _Done:
    def wait(self, seconds: float) -> None:
        """A local send copies at once."""


class LocalChannel:
    """One end of a pair in one process; `send` copies, so it never waits."""

    def __init__(self, who: str, whom: str, inward: _Pipe, outward: _Pipe) -> None:
        self.device = torch.device("cpu")
        self.who, self.whom = who, whom
        self.inward, self.outward = inward, outward

    def send(self, data: torch.Tensor) -> Transfer:
        if self.outward.closed:
            raise WeightSyncError(f"{self.who}: the channel to {self.whom} is closed")
        self.outward.messages.put(data.clone())
        return _Done()

    def recv(self, into: torch.Tensor) -> Transfer:
        return _LocalRecv(self, into)

    def close(self) -> None:
        self.inward.close()
        self.outward.close()


def local_channels(source: str, target: str) -> tuple[LocalChannel, LocalChannel]:
    """Both ends, named `source` and `target`."""
    there, back = _Pipe(), _Pipe()
    return LocalChannel(source, target, back, there), LocalChannel(target, source, there, back)
