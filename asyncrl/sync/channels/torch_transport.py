"""Channels over torch.distributed: raw process groups of two, gloo or NCCL, outside any default group.

The learner rank is member 0, the generator member 1. They exchange the addresses of gloo, or NCCL's id, over the
connection at which they have met (`listener.py`). Each session of a generator has a group of its own, which ends with
it: a generator that fails touches no other.

gloo and NCCL then open sockets of their own, which no secret protects: a private network is needed. gloo serves whoever
calls first, so that its ends prove themselves to each other before they send weights. `auto` chooses
NCCL between GPUs, and never gloo, which runs the same code on CPUs.

Two NCCL communicators in flight on one device must be launched in the same order everywhere, or they can
deadlock. A learner that sends to several generators from one GPU must launch its sends in one fixed order; this module
does not enforce it.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from hmac import compare_digest
from typing import Any, Literal

import msgpack
import torch
import torch.distributed as dist

from asyncrl.errors import DeadlineError, WeightSyncError
from asyncrl.sync.channels.channel import ChannelEnd, Meeting, Transfer, named

FRAME = struct.Struct("<I")
"""Bytes of an entry; a key and its value follow, in msgpack."""

PROOF_BYTES = 32

MOST_ENTRIES, LONGEST_ENTRY = 64, 1 << 16


class PairStore(dist.Store):
    """A store of two processes: each end sends what it sets to the other. Bounded; it ends with their connection.

    seconds: the longest wait for an entry of the other end
    """

    def __init__(self, joined: socket.socket, seconds: float) -> None:
        super().__init__()
        self._socket, self._seconds = joined, seconds
        self._entries: dict[str, bytes] = {}
        self._came = bytearray()
        self._lock = threading.RLock()

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        entry: bytes = msgpack.packb([key, data])
        with self._lock:
            self._keep(key, data, len(entry))
            self._socket.settimeout(self._seconds)
            self._socket.sendall(FRAME.pack(len(entry)) + entry)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def check(self, keys: Sequence[str]) -> bool:
        with self._lock:
            try:
                while self._receive(0.0):
                    pass
            except BlockingIOError:
                pass
            return all(key in self._entries for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        with self._lock:
            while not all(key in self._entries for key in keys):
                self._receive(max(0.001, deadline - time.monotonic()))

    def num_keys(self) -> int:
        return len(self._entries)

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def _receive(self, seconds: float) -> bool:
        """Take what has come, or comes first. Raises TimeoutError or BlockingIOError where nothing does."""
        self._socket.settimeout(seconds)
        came = self._socket.recv(LONGEST_ENTRY)
        if not came:
            raise ConnectionError("the other end has closed the connection")
        self._came += came
        while len(self._came) >= FRAME.size:
            (size,) = FRAME.unpack_from(self._came)
            if size > LONGEST_ENTRY:
                raise ConnectionError(f"the other end sent an entry of {size} bytes; at most {LONGEST_ENTRY}")
            if len(self._came) < FRAME.size + size:
                break
            key, value = msgpack.unpackb(self._came[FRAME.size : FRAME.size + size])
            del self._came[: FRAME.size + size]
            self._keep(str(key), bytes(value), size)
        return True

    def _keep(self, key: str, value: bytes, size: int) -> None:
        if size > LONGEST_ENTRY or len(self._entries) == MOST_ENTRIES:
            raise ConnectionError(f"at most {MOST_ENTRIES} entries of {LONGEST_ENTRY} bytes")
        self._entries[key] = value


def make_torch_channel(
    backend: Literal["gloo", "nccl"], joined: socket.socket, meeting: Meeting
) -> TorchChannel:
    """A group over a connection; gloo waits for the other member.

    NCCL meets in the first transfer, and ends one that takes longer than `meeting.transfer_s`.

    Raises:
        DeadlineError: the other member did not come
        WeightSyncError: any other failure, e.g. no such backend here
    """
    begun, who, whom = time.monotonic(), meeting.who, meeting.whom
    try:
        seconds = meeting.transfer_s if backend == "nccl" else None
        store = PairStore(joined, seconds or meeting.deadline_s)
        return TorchChannel(_group(backend, store, joined, meeting), store, joined, backend, meeting)
    except (AttributeError, RuntimeError, OSError) as error:
        joined.close()
        if time.monotonic() - begun >= meeting.deadline_s:
            raise DeadlineError(who, whom, f"weight channel {meeting.name}", meeting.deadline_s) from error
        raise WeightSyncError(f"{who}: no {backend} channel {meeting.name} to {whom}: {error}") from error


def _group(
    backend: Literal["gloo", "nccl"], store: PairStore, joined: socket.socket, meeting: Meeting
) -> Any:
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=meeting.transfer_s or meeting.deadline_s)
        return dist.ProcessGroupNCCL(store, meeting.member, 2, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=meeting.deadline_s)
    own_address = joined.getsockname()[0]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
    group = dist.ProcessGroupGloo(store, meeting.member, 2, options)
    _prove(group, store, meeting)
    return group


def _prove(group: Any, store: PairStore, meeting: Meeting) -> None:
    """Each end sends over the group what the other has told it over the connection: gloo serves whoever calls first.
    Raises ConnectionError for a stranger, before any weights leave."""
    own, peer, within = (
        secrets.token_bytes(PROOF_BYTES),
        1 - meeting.member,
        timedelta(seconds=meeting.deadline_s),
    )
    store.set(f"proof/{meeting.member}", own)
    told = torch.frombuffer(bytearray(store.get(f"proof/{peer}")), dtype=torch.uint8)
    came = torch.zeros(PROOF_BYTES, dtype=torch.uint8)
    leaving = group.send([told], peer, 0)
    group.recv([came], peer, 0).wait(within)
    leaving.wait(within)
    if not compare_digest(came.numpy().tobytes(), own):
        raise ConnectionError("another process has taken its place")


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

    def __init__(
        self, group: Any, store: PairStore, joined: socket.socket, backend: str, meeting: Meeting
    ) -> None:
        device = torch.device("cpu") if backend == "gloo" else meeting.device
        super().__init__(meeting.who, meeting.whom, device)
        self._group: Any = group
        self._store = store  # NCCL calls it in the first transfer, and torch does not keep the Python object
        self._socket, self._peer = joined, 1 - meeting.member
        self._sent = self._received = 0

    def send(self, data: torch.Tensor) -> Transfer:
        self._sent += 1
        return self._begin("send", data, self._sent)

    def recv(self, into: torch.Tensor) -> Transfer:
        self._received += 1
        return self._begin("recv", into, self._received)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self.ends()
        # The group's destructor closes its connections once the last transfer lets go of it.
        self._group = None
        self._socket.close()

    def _begin(self, verb: Literal["send", "recv"], data: torch.Tensor, tag: int) -> Transfer:
        self.check()
        try:
            work = getattr(self._group, verb)([data], self._peer, tag)
        except (RuntimeError, OSError) as error:
            raise self.breaks(error) from error
        return _TorchTransfer(self, work, named(verb, data))
