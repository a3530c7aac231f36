"""Channels over TCP: each message is its length and its bytes, from tensor to socket and from socket to tensor.

      send ─▸ leaving ─┐                     ┌─▸ header ─▸ the tensor of the oldest receive
                       ├── `finish` ─ socket ┤      another length ─▸ the channel breaks
      recv ─▸ coming ──┘   (in `wait`)       └── closed ─▸ the channel breaks

A send begins at once with as much as the socket takes; the rest goes while somebody waits. The bytes are not encrypted.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch

from asyncrl.sync.channels.channel import ChannelEnd, Transfer, named

HEADER = struct.Struct("<Q")
"""Bytes of the message."""


@dataclass(frozen=True, slots=True)
class _TcpTransfer:
    channel: TcpChannel
    verb: Literal["send", "recv"]
    number: int
    what: str

    def wait(self, seconds: float) -> None:
        self.channel.finish(self.verb, self.number, self.what, seconds)


@dataclass(slots=True)
class _Coming:
    """A message that is expected: what is left of its header, and of its bytes."""

    header: bytearray
    left: memoryview
    bytes: int


class TcpChannel(ChannelEnd):
    """A `Channel` over a connected socket."""

    def __init__(self, joined: socket.socket, who: str, whom: str) -> None:
        super().__init__(who, whom, torch.device("cpu"))
        joined.setblocking(False)
        self._socket = joined
        self._lock = threading.Lock()  # of everything below
        self._begun = {"send": 0, "recv": 0}
        self._done = {"send": 0, "recv": 0}
        self._leaving: deque[list[memoryview]] = deque()
        self._coming: deque[_Coming] = deque()

    def send(self, data: torch.Tensor) -> Transfer:
        with self._lock:
            self.check()
            self._leaving.append([memoryview(HEADER.pack(data.numel())), data.numpy().data])
            self._begun["send"] += 1
            self._write()
            return _TcpTransfer(self, "send", self._begun["send"], named("send", data))

    def recv(self, into: torch.Tensor) -> Transfer:
        with self._lock:
            self.check()
            self._coming.append(_Coming(bytearray(), into.numpy().data, into.numel()))
            self._begun["recv"] += 1
            return _TcpTransfer(self, "recv", self._begun["recv"], named("recv", into))

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self.ends()
        with suppress(OSError):  # wakes a thread that waits here, which then lets go of the lock
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._socket.close()
            self._leaving.clear()
            self._coming.clear()

    def finish(self, verb: str, number: int, what: str, seconds: float) -> None:
        """Send and receive until that transfer is done. Raises as `Transfer.wait`."""
        deadline = time.monotonic() + seconds
        if not self._lock.acquire(timeout=max(0.0, seconds)):
            raise self.late(what, seconds)
        try:
            while True:
                self._write()
                self._read()
                if self._done[verb] >= number:
                    return
                self.check()
                if not self._ready(deadline):
                    raise self.late(what, seconds)
        finally:
            self._lock.release()

    # With the lock held.

    def _ready(self, deadline: float) -> bool:
        poll = select.poll()
        poll.register(
            self._socket, (select.POLLIN if self._coming else 0) | (select.POLLOUT if self._leaving else 0)
        )
        return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))

    def _write(self) -> None:
        while self._leaving and not self._broken:
            message = self._leaving[0]
            try:
                sent = self._socket.sendmsg(message)
            except BlockingIOError:
                return
            except OSError as error:
                raise self.breaks(error) from error
            while message and sent >= len(message[0]):
                sent -= len(message.pop(0))
            if message:
                message[0] = message[0][sent:]
            else:
                self._leaving.popleft()
                self._done["send"] += 1

    def _read(self) -> None:
        while self._coming and not self._broken:
            coming = self._coming[0]
            try:
                if len(coming.header) < HEADER.size:
                    came = self._socket.recv(HEADER.size - len(coming.header))
                    coming.header += came
                    count = len(came)
                else:
                    count = self._socket.recv_into(coming.left)
                    coming.left = coming.left[count:]
            except BlockingIOError:
                return
            except OSError as error:
                raise self.breaks(error) from error
            if not count:
                raise self.breaks(f"{self.whom} closed it, or died")
            if len(coming.header) < HEADER.size:
                continue
            (size,) = HEADER.unpack(coming.header)
            if size != coming.bytes:
                raise self.breaks(f"{size} bytes came where {coming.bytes} were expected")
            if not coming.left:
                self._coming.popleft()
                self._done["recv"] += 1
