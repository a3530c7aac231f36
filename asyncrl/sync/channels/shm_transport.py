"""Channels between two processes of one host, over memory that both have mapped.

      sender                             socket                             receiver
      lie in a segment? else copied ──▸ DATA segment, places ───────────▸ maps a new segment once, copies out
      their send is done            ◂── TAKEN ─────────────────────────── after each

Tensors that lie in a shared segment already (`shared_memory`) are copied once, by the receiver, from where they lie to
where they belong; others are copied into a segment first. The socket carries packets of some 40 bytes, the places
(`described`) and, when a segment comes for the first time, the descriptor that opens it. When an end dies the kernel
closes its socket, which the other notices at once, and frees memory that is mapped nowhere: neither socket nor segment
has a name in a file system.

On a GPU the same packets carry a CUDA IPC handle instead of a descriptor; each end lets the device finish before it
sends a packet. This has not run on a GPU yet.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from asyncrl.device import accelerator
from asyncrl.errors import WeightSyncError
from asyncrl.sync.channels.channel import ChannelEnd, Transfer, named
from asyncrl.sync.channels.shared_memory import (
    SharedSegment,
    described,
    mapped,
    shared_memory,
    shared_views,
)
from asyncrl.sync.plan.plan import aligned

PACKET = struct.Struct("<BQQQQ")
"""Kind, number of the segment, count of the numbers that describe places in it, bytes of the tensors, bytes of the
segment; the numbers follow, and perhaps a CUDA handle."""

DATA, TAKEN = 1, 2
LONGEST = 1 << 16
MOST_PARTS = 1024
"""Bytes of a packet, and tensors in one."""

MOST_ARRIVED = 64
"""Packets with tensors that nobody expects yet: each may bring a segment, and a process can map some 65,000."""

LEAST_SLOT = 4096


@dataclass(frozen=True, slots=True)
class _ShmTransfer:
    channel: ShmChannel
    verb: Literal["send", "recv"]
    number: int
    what: str

    def wait(self, seconds: float) -> None:
        self.channel.finish(lambda done: done[self.verb] >= self.number, self.what, seconds)


class ShmChannel(ChannelEnd):
    """A `SharingChannel` over a connected socket of two processes of one host."""

    def __init__(self, joined: socket.socket, who: str, whom: str, device: torch.device) -> None:
        super().__init__(who, whom, device)
        joined.setblocking(False)
        self._socket = joined
        self._lock = threading.Lock()  # of everything below, and of reading the socket
        self._begun = {"send": 0, "recv": 0}
        self._done = {"send": 0, "recv": 0}
        self._slots: list[torch.Tensor] = []  # free segments, for tensors that lie in none
        # Tensors that the peer reads, and whether they are a slot.
        self._leaving: deque[tuple[Sequence[torch.Tensor], bool]] = deque()
        self._known: set[int] = set()  # numbers of our segments that the peer has mapped
        self._mapped: dict[int, torch.Tensor] = {}  # the peer's, by its numbers
        self._arrived: deque[Arrived] = deque()
        self._expected: deque[Sequence[torch.Tensor]] = deque()

    def send(self, data: torch.Tensor) -> Transfer:
        return self.send_parts([data])

    def recv(self, into: torch.Tensor) -> Transfer:
        return self.recv_parts([into])

    def send_parts(self, parts: Sequence[torch.Tensor]) -> Transfer:
        with self._lock:
            self.check()
            for some in _packets(parts):
                place = described(some) if some[0].device.type == self.device.type else None
                slot = None if place else self._slot(sum(aligned(part.nbytes) for part in some))
                shared = some if slot is None else _copied(some, slot)
                accelerator.wait_for_stream(self.device)
                self._announce(shared, place or described(shared))
                self._leaving.append((shared if slot is None else [slot], slot is not None))
                self._begun["send"] += 1
            return _ShmTransfer(self, "send", self._begun["send"], named("send", *parts))

    def recv_parts(self, into: Sequence[torch.Tensor]) -> Transfer:
        with self._lock:
            self.check()
            packets = _packets(into)
            self._expected.extend(packets)
            self._begun["recv"] += len(packets)
            return _ShmTransfer(self, "recv", self._begun["recv"], named("recv", *into))

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self.ends()
        with suppress(OSError):  # wakes a thread that waits here, which then lets go of the lock
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._socket.close()
            for tensors in (self._slots, self._leaving, self._mapped, self._arrived, self._expected):
                tensors.clear()

    def finish(self, done: Callable[[dict[str, int]], bool], what: str, seconds: float) -> None:
        """Take packets, and copy the tensors of each, until `done`. Raises as `Transfer.wait`."""
        deadline = time.monotonic() + seconds
        if not self._lock.acquire(timeout=max(0.0, seconds)):
            raise self.late(what, seconds)
        try:
            while True:
                while self._arrived and self._expected:
                    self._copy(self._arrived.popleft(), self._expected.popleft())
                if done(self._done):
                    return
                self.check()
                if not self._readable(deadline):
                    raise self.late(what, seconds)
                self._take_packet()
        finally:
            self._lock.release()

    # With the lock held.

    def _slot(self, size: int) -> torch.Tensor:
        """The smallest free one that is large enough; else a new one, in place of one too small."""
        fitting = [index for index, slot in enumerate(self._slots) if slot.numel() >= size]
        if fitting:
            return self._slots.pop(min(fitting, key=lambda index: self._slots[index].numel()))
        if self._slots:
            self._slots.pop()
        try:
            return shared_memory(max(LEAST_SLOT, 1 << (size - 1).bit_length()), self.device)
        except OSError as error:
            raise self.breaks(error) from error

    def _announce(self, parts: Sequence[torch.Tensor], place: tuple[SharedSegment, list[int]] | None) -> None:
        assert place is not None
        segment, numbers = place
        size = sum(part.nbytes for part in parts)
        packet = PACKET.pack(DATA, segment.number, len(numbers), size, segment.size)
        packet += struct.pack(f"<{len(numbers)}Q", *numbers)
        if segment.number in self._known:
            self._post(packet, [])
        else:
            self._post(packet + accelerator.memory_handle(parts[0]), [segment.fd] if segment.fd >= 0 else [])
            self._known.add(segment.number)

    def _post(self, packet: bytes, fds: list[int]) -> None:
        try:
            socket.send_fds(self._socket, [packet], fds, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise self.breaks(f"{self.whom} leaves its packets unread") from None
        except OSError as error:
            raise self.breaks(error) from error

    def _readable(self, deadline: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))))

    def _take_packet(self) -> None:
        try:
            packet, fds, *_ = socket.recv_fds(self._socket, LONGEST, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise self.breaks(error) from error
        try:
            if not packet:
                raise self.breaks(f"{self.whom} closed it, or died")
            kind, number, count, length, size = PACKET.unpack_from(packet)
            if kind == TAKEN and self._leaving:
                self._taken()
            elif kind == DATA and count <= LONGEST and len(self._arrived) < MOST_ARRIVED:
                numbers = struct.unpack_from(f"<{count}Q", packet, PACKET.size)
                if number not in self._mapped:
                    handle = packet[PACKET.size + 8 * count :]
                    self._mapped[number] = mapped(size, fds[0] if fds else -1, handle)
                self._arrived.append(Arrived(self._mapped[number], numbers, length))
            else:
                raise self.breaks(f"a packet of kind {kind} came, and {len(self._arrived)} wait")
        except (OSError, ValueError, struct.error, WeightSyncError) as error:
            raise self.breaks(error) from error
        finally:
            for fd in fds:
                os.close(fd)

    def _taken(self) -> None:
        tensors, is_slot = self._leaving.popleft()
        if is_slot:
            self._slots += tensors
        self._done["send"] += 1

    def _copy(self, arrived: Arrived, into: Sequence[torch.Tensor]) -> None:
        expected = sum(part.nbytes for part in into)
        if arrived.bytes != expected:
            raise self.breaks(f"{arrived.bytes} bytes came where {expected} were expected")
        try:
            there = shared_views(arrived.memory, into, arrived.numbers)
        except WeightSyncError as error:
            raise self.breaks(error) from error
        torch._foreach_copy_(list(into), there)
        accelerator.wait_for_stream(self.device)
        self._post(PACKET.pack(TAKEN, 0, 0, 0, 0), [])
        self._done["recv"] += 1


class Arrived(NamedTuple):
    """Tensors in the peer's memory that it has sent: their places (`described`) and bytes."""

    memory: torch.Tensor
    numbers: Sequence[int]
    bytes: int


def _packets(parts: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    """Both ends divide them alike."""
    return [parts[at : at + MOST_PARTS] for at in range(0, len(parts), MOST_PARTS)]


def _copied(parts: Sequence[torch.Tensor], slot: torch.Tensor) -> list[torch.Tensor]:
    """Copies, one after another in the slot."""
    copies, at = [], 0
    for part in parts:
        room = slot[at : at + part.nbytes]
        copies.append(room.view(part.dtype).view(part.shape).copy_(part))
        at += aligned(part.nbytes)
    return copies
