"""The seam between the weight stream and what carries its bytes.

A `Channel` joins two processes, mostly a learner rank and a generator. Bytes arrive in the order they were sent; sizes
are known to both ends beforehand. A channel that raised is dead: close it and make another.

`local_channels` is the golden implementation: slow, in one process, and the one that the others are compared with.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from asyncrl.errors import DeadlineError, WeightSyncError


class Transfer(Protocol):
    """One buffer on its way. The buffer must stay as it is until `wait` returns."""

    def wait(self, seconds: float) -> None:
        """Raises DeadlineError after `seconds`, WeightSyncError for a broken channel; both name both ends.

        A send may wait until the other end waits for its receive.
        """


class Channel(Protocol):
    """Used by one thread at a time, `close` apart."""

    device: torch.device  # where the bytes must lie

    def send(self, data: torch.Tensor) -> Transfer:
        """Begin to send [bytes] uint8, contiguous. Raises WeightSyncError when the channel is broken."""

    def recv(self, into: torch.Tensor) -> Transfer:
        """Begin to fill [bytes] uint8, contiguous. Raises WeightSyncError when the channel is broken."""

    def close(self) -> None:
        """Free it; transfers at both ends then fail. May be called again, and from another thread."""


@runtime_checkable
class SharingChannel(Channel, Protocol):
    """One whose ends can read each other's memory: tensors are copied once, from where they lie to where they belong,
    whatever their strides."""

    def send_parts(self, parts: Sequence[torch.Tensor]) -> Transfer:
        """Begin to send them; the other end calls `recv_parts` with as many, of the same shapes and dtypes."""

    def recv_parts(self, into: Sequence[torch.Tensor]) -> Transfer:
        """Begin to fill them."""


class ChannelEnd:
    """What every channel has: the names of both ends, and a memory of what broke it."""

    def __init__(self, who: str, whom: str, device: torch.device) -> None:
        self.who, self.whom, self.device = who, whom, device
        self._broken = ""

    def check(self) -> None:
        """WeightSyncError if this channel has raised before, or is closed."""
        if self._broken:
            raise WeightSyncError(f"{self.who}: the channel to {self.whom} {self._broken}")

    def breaks(self, why: object) -> WeightSyncError:
        """The error to raise; from now on the channel is dead. What ended it first stays the reason."""
        self._broken = self._broken or f"broke: {why}"
        return WeightSyncError(f"{self.who}: the channel to {self.whom} {self._broken}")

    def late(self, what: str, seconds: float) -> DeadlineError:
        """Like `breaks`, for a wait that ran out."""
        self._broken = self._broken or f"broke: {what} came too late"
        return DeadlineError(self.who, self.whom, what, seconds)

    def ends(self) -> None:
        """It is closed here."""
        self._broken = self._broken or "is closed"


def named(verb: str, *data: torch.Tensor) -> str:
    """A transfer in an error's words."""
    return f"{verb} of {sum(map(bytes_of, data))} bytes of weights"


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


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
