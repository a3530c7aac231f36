"""Channels over torch.distributed: raw two-member process groups, gloo or NCCL, outside any default group.

The learner rank is member 0 and hosts the store where both members meet; the generator is member 1. Each session of a
generator has a group of its own name, torn down with it: a generator that fails touches no other.

Two NCCL communicators in flight on one device must be launched in the same order everywhere, or they can
deadlock. A learner that sends to several generators from one GPU must launch its sends in one fixed order; this module
does not enforce it.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from asyncrl.errors import DeadlineError, WeightSyncError
from asyncrl.sync.channels.channel import ChannelEnd, Meeting, Transfer, named

LOOPBACK = "127.0.0.1"

SOURCE, TARGET = 0, 1
"""Members of a channel's group: the learner rank, the generator."""


def host_store(host: str, deadline_s: float) -> dist.TCPStore:
    """A store that listens on `host` alone, at a free port (`.port`)."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=deadline_s),
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, deadline_s: float) -> dist.TCPStore:
    """The generator's side of `host_store`."""
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=deadline_s))
    except RuntimeError as error:
        raise WeightSyncError(f"cannot reach the weight store at {host}:{port}: {error}") from error


def own_address(towards: str, port: int) -> str:
    """The address of this machine on its route to a peer. Nothing is sent."""
    family, kind, protocol, _, peer = socket.getaddrinfo(towards, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])


def own_host(queue_address: str) -> str:
    """The address of this machine on its route to the queue: processes that reach the queue reach this machine there.

    >>> own_host("tcp://127.0.0.1:5555"), own_host("tcp://[::1]:5555"), own_host("ipc:///tmp/queue")
    ('127.0.0.1', '127.0.0.1', '127.0.0.1')
    """
    queue = urlsplit(queue_address)
    if queue.hostname in (None, "::1"):
        return LOOPBACK
    return own_address(str(queue.hostname), queue.port or 1)


def make_torch_channel(backend: Literal["gloo", "nccl"], meeting: Meeting) -> TorchChannel:
    """Join the group of a channel; waits for the other member.

    NCCL meets in the first transfer, and ends one that takes longer than `meeting.transfer_s`.

    Raises:
        DeadlineError: the other member did not come
        WeightSyncError: any other failure, e.g. no such backend here
    """
    begun, who, whom = time.monotonic(), meeting.who, meeting.whom
    store, peer = dist.PrefixStore(meeting.name, meeting.store), 1 - meeting.member
    try:
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=meeting.transfer_s or meeting.deadline_s)
            meeting.store.set_timeout(options._timeout)
            group: Any = dist.ProcessGroupNCCL(store, meeting.member, 2, options)
            return TorchChannel(group, peer, who, whom, meeting.device)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=meeting.deadline_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.own_host)]
        group = dist.ProcessGroupGloo(store, meeting.member, 2, options)
        return TorchChannel(group, peer, who, whom, torch.device("cpu"))
    except (AttributeError, RuntimeError) as error:
        if time.monotonic() - begun >= meeting.deadline_s:
            raise DeadlineError(who, whom, f"weight channel {meeting.name}", meeting.deadline_s) from error
        raise WeightSyncError(f"{who}: no {backend} channel {meeting.name} to {whom}: {error}") from error


@dataclass(frozen=True, slots=True)
class _TorchTransfer:
    channel: TorchChannel
    work: Any  # torch's Work
    what: str

    def wait(self, seconds: float) -> None:
        begun = time.monotonic()
        try:
            self.work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:
            if time.monotonic() - begun >= seconds:
                raise self.channel.late(self.what, seconds) from error
            raise self.channel.breaks(error) from error


class TorchChannel(ChannelEnd):
    """A `Channel` over a raw process group of two."""

    def __init__(self, group: Any, peer: int, who: str, whom: str, device: torch.device) -> None:
        super().__init__(who, whom, device)
        self._group: Any = group
        self._peer = peer
        self._sent = self._received = 0

    def send(self, data: torch.Tensor) -> Transfer:
        self._sent += 1
        return self._begin("send", data, self._sent)

    def recv(self, into: torch.Tensor) -> Transfer:
        self._received += 1
        return self._begin("recv", into, self._received)

    def close(self) -> None:
        self.ends()
        # The group's destructor closes its connections once the last transfer lets go of it.
        self._group = None

    def _begin(self, verb: Literal["send", "recv"], data: torch.Tensor, tag: int) -> Transfer:
        self.check()
        try:
            work = getattr(self._group, verb)([data], self._peer, tag)
        except RuntimeError as error:
            raise self.breaks(error) from error
        return _TorchTransfer(self, work, named(verb, data))
