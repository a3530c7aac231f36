"""The protocols between the weight stream and the transports that carry its bytes.

A `Channel` joins two processes, mostly a learner rank and a generator. Bytes arrive in the order they were sent; sizes
are known to both ends beforehand. A channel that raised is dead: close it and make another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from asyncrl.errors import DeadlineError, WeightSyncError

SOURCE, TARGET = 0, 1
"""The ends of a channel: the learner rank or relay, the generator."""


class Transfer(Protocol):
    """One buffer on its way. The buffer must stay as it is until `wait` returns."""

    def wait(self, seconds: float) -> None:
        """Raises DeadlineError after `seconds`, WeightSyncError for a broken channel; both name both ends.

        It may block until the other end calls `wait` on its transfer too.
        """


class Channel(Protocol):
    """Used by one thread at a time, `close` apart."""

    device: torch.device  # where the bytes must lie

    def send(self, data: torch.Tensor) -> Transfer:
        """Begin to send [bytes] uint8, contiguous. Raises WeightSyncError when the channel is broken."""

    def recv(self, into: torch.Tensor) -> Transfer:
        """Begin to fill [bytes] uint8, contiguous. Raises WeightSyncError when the channel is broken."""

    def fileno(self) -> int:
        """The descriptor of the connection to the other end, which hangs up when that end is gone."""

    def close(self) -> None:
        """Free it; transfers at both ends then fail. May be called again, and from another thread."""


@runtime_checkable
class SharingChannel(Channel, Protocol):
    """A channel whose ends can read each other's memory: it copies tensors of any strides once, from where they lie to
    where they belong."""

    def send_parts(self, parts: Sequence[torch.Tensor]) -> Transfer:
        """Begin to send them; the other end calls `recv_parts` with as many, of the same shapes and dtypes."""

    def recv_parts(self, into: Sequence[torch.Tensor]) -> Transfer:
        """Begin to fill them."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """A channel that is to be made, as one of its ends sees it.

    name: of the channel, for errors · member: SOURCE or TARGET · who, whom: this end and the other, for errors ·
    device: of the tensors here · deadline_s: the longest wait for the other end
    """

    name: str
    member: int
    who: str
    whom: str
    device: torch.device
    deadline_s: float


class ChannelEnd:
    """The part that all channels share: the names of both ends, and the reason why the channel broke."""

    def __init__(self, who: str, whom: str, device: torch.device) -> None:
        self.who, self.whom, self.device = who, whom, device
        self._broken = ""

    def check(self) -> None:
        """WeightSyncError if this channel has raised before, or is closed."""
        if self._broken:
            raise WeightSyncError(f"{self.who}: the channel to {self.whom} {self._broken}")

    def breaks(self, why: object) -> WeightSyncError:
        """The error to raise; from now on the channel is dead. Its first reason stays."""
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
    """The name of a transfer in errors."""
    return f"{verb} of {sum(tensor.nbytes for tensor in data)} bytes of weights"
