"""A store of torch.distributed for two processes: where they exchange gloo's addresses, or NCCL's id."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import msgpack
import torch.distributed as dist

FRAME = struct.Struct("<I")
"""Bytes of an entry; a key and its value follow, in msgpack."""

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
