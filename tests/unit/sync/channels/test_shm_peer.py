"""A peer of a channel of shared memory that knows the secret and keeps to no rule."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator

import pytest
import torch

from asyncrl.errors import WeightSyncError
from asyncrl.sync.channels.shm_transport import DATA, MOST_ARRIVED, PACKET, ShmChannel

WAIT_S = 20.0
CPU = torch.device("cpu")

Ends = tuple[ShmChannel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = ShmChannel(ours, "learner rank 0", "generator-0", CPU)
    with theirs:
        yield channel, theirs
    channel.close()


def announce(
    peer: socket.socket, number: int, places: list[int], size: int = 64, seals: int = fcntl.F_SEAL_SHRINK
) -> None:
    """A new segment, and a tensor of 8 bytes in it."""
    fd = os.memfd_create("a test", os.MFD_ALLOW_SEALING)
    os.truncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    packet = PACKET.pack(DATA, number, len(places), 8, size) + struct.pack(f"<{len(places)}Q", *places)
    socket.send_fds(peer, [packet], [fd])
    os.close(fd)


def test_tensors_that_nobody_expects_are_bounded(ends: Ends) -> None:
    """A process that maps some 65,000 segments can map no more memory at all."""
    channel, peer = ends
    for number in range(MOST_ARRIVED + 1):
        announce(peer, number, [0, 1])
    with pytest.raises(WeightSyncError, match=rf"broke: a packet of kind 1 came, and {MOST_ARRIVED} wait"):
        channel.send(torch.zeros(8, dtype=torch.uint8)).wait(WAIT_S)
    assert len(channel._mapped) == MOST_ARRIVED


@pytest.mark.parametrize(
    ("places", "size", "seals"),
    [
        ([0, 1 << 62, 1], 64, fcntl.F_SEAL_SHRINK),
        ([0, (1 << 64) - 1, 1], 64, fcntl.F_SEAL_SHRINK),
        ([1 << 63, 8, 1], 64, fcntl.F_SEAL_SHRINK),
        ([57, 8, 1], 64, fcntl.F_SEAL_SHRINK),
        ([0, 8, 1, 1], 64, fcntl.F_SEAL_SHRINK),
        ([0, 8, 1], 0, fcntl.F_SEAL_SHRINK),
        ([0, 8, 1], 64, fcntl.F_SEAL_GROW),
    ],
)
def test_a_place_that_is_none_breaks_the_channel_by_name(
    places: list[int], size: int, seals: int, ends: Ends
) -> None:
    channel, peer = ends
    announce(peer, 1, places, size, seals)
    with pytest.raises(WeightSyncError, match="learner rank 0: the channel to generator-0 broke"):
        channel.recv(torch.zeros(1, 8, dtype=torch.uint8)).wait(WAIT_S)
