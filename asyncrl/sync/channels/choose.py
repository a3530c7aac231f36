"""Which kind of channel joins two processes, and opening it.

    sync.backend    auto: shm if both ends can map each other's memory, else nccl between GPUs, else tcp
                    shm · nccl · tcp · gloo: that one, or a refusal with the reason

The generator's `attach` has its `EndPlace`; the reply of the learner rank has the kind that it chose.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch

from asyncrl.device import accelerator
from asyncrl.errors import RefusedError
from asyncrl.rpc.ports import ANY
from asyncrl.sync.channels.channel import Channel, Meeting
from asyncrl.sync.channels.gloo_transport import make_gloo_channel
from asyncrl.sync.channels.listener import ChannelListener, connected
from asyncrl.sync.channels.nccl_transport import make_nccl_channel
from asyncrl.sync.channels.shared_memory import AVAILABLE
from asyncrl.sync.channels.shm_transport import ShmChannel
from asyncrl.sync.channels.tcp_transport import TcpChannel

Kind = Literal["tcp", "gloo", "nccl", "shm"]


@dataclass(frozen=True, slots=True)
class EndPlace:
    """Where an end is. host: the same for processes that can pass each other memory, "" where none can · gpu: of its
    tensors, "" for the CPU · sees: all GPUs that its process can open."""

    host: str
    gpu: str = ""
    sees: tuple[str, ...] = ()

    def shares_memory_with(self, other: EndPlace) -> bool:
        """A GPU's memory can be opened only by a process that sees this GPU."""
        return (
            bool(self.host)
            and self.host == other.host
            and bool(self.gpu) == bool(other.gpu)
            and (not self.gpu or (self.gpu in other.sees and other.gpu in self.sees))
        )

    def to_wire(self) -> dict[str, Any]:
        return {"host": self.host, "gpu": self.gpu, "sees": list(self.sees)}

    @staticmethod
    def from_wire(fields: Mapping[str, Any]) -> EndPlace:
        """Raises KeyError and TypeError for anything that `to_wire` does not make."""
        return EndPlace(str(fields["host"]), str(fields["gpu"]), tuple(map(str, fields["sees"])))


def place_of(device: torch.device) -> EndPlace:
    """This process, with its tensors on `device`."""
    if not accelerator.is_accelerator(device):
        return EndPlace(_host())
    if not accelerator.shares_memory(
        device
    ):  # neither NCCL nor handles: its bytes travel through this host's memory
        return EndPlace("")
    return EndPlace(_host(), accelerator.unique_name(device), tuple(accelerator.unique_names()))


def choose(wanted: str, here: EndPlace, there: EndPlace) -> Kind:
    """The kind of channel. wanted: sync.backend. Raises RefusedError("backend") for one that cannot join the two."""
    on_gpus = bool(here.gpu) and bool(there.gpu)
    if wanted == "auto":
        return "shm" if here.shares_memory_with(there) else "nccl" if on_gpus else "tcp"
    if wanted == "shm" and not here.shares_memory_with(there):
        raise RefusedError("backend", "sync.backend is shm, and the two cannot map each other's memory")
    if wanted == "nccl" and not on_gpus:
        raise RefusedError("backend", "sync.backend is nccl, and the weights are not on a GPU at both ends")
    return cast(Kind, wanted)


def listen(kind: Kind, host: str, ports: range = ANY) -> ChannelListener:
    """Where the other end of a channel enters. host: address of this machine. Raises OSError."""
    return ChannelListener(None if kind == "shm" else host, ports)


def accept(kind: Kind, listener: ChannelListener, meeting: Meeting) -> Channel:
    """Wait for the other end. Raises DeadlineError if it does not come, WeightSyncError for any other failure."""
    return _made(kind, listener.accept(meeting), meeting)


def connect(kind: Kind, offer: Mapping[str, Any], meeting: Meeting) -> Channel:
    """Enter by the offer of a listener. Raises as `accept`."""
    return _made(kind, connected("unix" if kind == "shm" else "tcp", offer, meeting), meeting)


def _made(kind: Kind, joined: socket.socket, meeting: Meeting) -> Channel:
    if kind == "nccl":
        return make_nccl_channel(joined, meeting)
    if kind == "gloo":
        return make_gloo_channel(joined, meeting)
    if kind == "tcp":
        return TcpChannel(joined, meeting.who, meeting.whom)
    return ShmChannel(joined, meeting.who, meeting.whom, meeting.device)


def _host() -> str:
    """This boot of this machine, its network namespace (sockets meet there) and the user."""
    if not AVAILABLE:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.getuid()}"
    except OSError:
        return ""
