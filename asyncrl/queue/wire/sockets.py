"""Messages of several frames on a ZeroMQ socket, without waiting.

As pyzmq's `send_multipart` and `recv_multipart` with NOBLOCK, in a good half of their time: those make an enum of every
frame's flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

NOW = int(zmq.NOBLOCK)
MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
EVENTS, READABLE = int(zmq.EVENTS), int(zmq.POLLIN)

LARGEST_KEPT = (32 << 20) - (64 << 10)
"""Bytes of the largest block that glibc can be brought to keep for reuse (M_MMAP_THRESHOLD of mallopt(3))."""


def keep_freed_memory() -> None:
    """Let the memory of frames be used again: fresh pages cost more than what is done with the bytes in them.

    glibc gives freed memory back to the system where there are 128 KiB of it, until it has seen a larger block freed
    (mallopt(3), "dynamic mmap threshold"). One that nobody writes to costs nothing; elsewhere it does nothing.
    """
    bytes(LARGEST_KEPT)


def send(socket: zmq.Socket, frames: Sequence[Any]) -> None:
    """Large frames are not copied. zmq.Again if there is no room for the message."""
    for frame in frames[:-1]:
        socket.send(frame, MORE, copy=False)
    socket.send(frames[-1], NOW, copy=False)


def receive(socket: zmq.Socket) -> list[zmq.Frame]:
    """No frames if no message is there."""
    events: Any = socket.get(EVENTS)
    if not events & READABLE:  # to ask takes a third of the time that an Again takes to be raised
        return []
    try:
        frames = [socket.recv(NOW, copy=False)]
    except zmq.Again:  # the connection went in between
        return []
    while frames[-1].more:
        frames.append(socket.recv(NOW, copy=False))
    return frames
