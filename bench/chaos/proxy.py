"""A proxy on the loopback that delays, cuts and corrupts what passes.

generator, learner ──▸ a port of the proxy for each server ──▸ queue · learner's weight stream
                         │
     delay: every connection is late by a time of its own, so that messages of two change their order
     cut: half of the connections, or all, are closed, and new ones are refused for a while
     corrupt: one byte is changed in each of the next pieces
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PIECE = 1 << 20
LATEST_S = 0.4
"""Longest delay of a piece on one connection."""

GONE_S = 1.0
"""A server that does not listen is tried again after so long; meanwhile the proxy does not listen in its place."""

PORT = struct.Struct("!H")


class Proxy:
    """Listens from the start, on threads of its own, until `close`.

    Attributes:
        port: Where `port_towards` finds it.
        corrupted: Number of the server's port → bytes that were changed on its connections.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.Lock()  # of everything below
        self._ports: dict[int, int] = {}  # of a server → the proxy's in its place
        self._doors: dict[int, socket.socket] = {}
        self._open: list[tuple[socket.socket, socket.socket]] = []
        self._refuse_until = self._delay_until = 0.0
        self._to_corrupt = 0
        self._at: int | None = None
        self._closed = False
        self.corrupted: Counter[int] = Counter()
        self._listener = _listening()
        self.port = int(self._listener.getsockname()[1])
        _thread(self._answer)

    def cut(self, seconds: float, every: bool = True) -> int:
        """Close all connections, or about half of them, and refuse new ones for `seconds`. Returns how many."""
        with self._lock:
            self._refuse_until = time.monotonic() + seconds
            chosen = [pair for pair in self._open if every or self._rng.random() < 0.5]
            doors = [*self._doors.values()]
        for pair in chosen:
            _shut(*pair)
        _shut(*doors)
        return len(chosen)

    def delay(self, seconds: float) -> None:
        """For so long, each connection delays each piece by a time of its own, up to `LATEST_S`."""
        with self._lock:
            self._delay_until = time.monotonic() + seconds

    def corrupt(self, pieces: int, at: int | None = None) -> None:
        """Change one byte in each of the next `pieces`, whichever connections they are on.

        at: its index in the piece; None: any
        """
        with self._lock:
            self._to_corrupt += pieces
            self._at = at

    def close(self) -> None:
        self._closed = True
        _shut(self._listener)
        self._listener.close()
        self.cut(0.0)

    def _answer(self) -> None:
        """Those that ask for the port towards a server."""
        with suppress(OSError):  # closed
            while True:
                caller, _ = self._listener.accept()
                with caller, suppress(OSError):
                    (server,) = PORT.unpack(_exactly(caller, PORT.size))
                    caller.sendall(PORT.pack(self._door(server)))

    def _door(self, server: int) -> int:
        """The port of the proxy in whose place this server is."""
        with self._lock:
            if server not in self._ports:
                door = self._doors[server] = _listening()
                self._ports[server] = port = int(door.getsockname()[1])
                _thread(self._serve, door, server, port)
            return self._ports[server]

    def _serve(self, door: socket.socket, server: int, port: int) -> None:
        """Closed while new connections are refused, as it would be if the network was down."""
        while not self._closed:
            with door:
                refused_s = self._let_in(door, server)
            time.sleep(refused_s)
            with self._lock:
                self._doors[server] = door = _listening(port)
        door.close()

    def _let_in(self, door: socket.socket, server: int) -> float:
        """Until connections are refused. Returns for how long."""
        while (refused_s := self._refuse_until - time.monotonic()) <= 0 and not self._closed:
            try:
                client, _ = door.accept()
            except OSError:  # by `cut`
                continue
            try:
                joined = socket.create_connection(("127.0.0.1", server))
            except OSError:
                client.close()
                return GONE_S
            _thread(self._join, client, joined, server)
        return max(0.0, refused_s)

    def _join(self, client: socket.socket, server: socket.socket, port: int) -> None:
        """Until an end closes."""
        pair = client, server
        with self._lock:
            self._open.append(pair)
            late_s = self._rng.uniform(0.0, LATEST_S)
        with client, server:
            for end in pair:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = _thread(self._pump, server, client, port, late_s)
            self._pump(client, server, port, late_s)
            back.join()
            with self._lock:
                self._open.remove(pair)

    def _pump(self, source: socket.socket, to: socket.socket, port: int, late_s: float) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE):
                if time.monotonic() < self._delay_until:
                    time.sleep(late_s)
                to.sendall(self._passed(piece, port))
        _shut(source, to)

    def _passed(self, piece: bytes, port: int) -> bytes:
        with self._lock:
            if not self._to_corrupt:
                return piece
            self._to_corrupt -= 1
            self.corrupted[port] += 1
            changed = bytearray(piece)
            at = self._rng.randrange(len(piece)) if self._at is None else self._at
            changed[at] ^= self._rng.randrange(1, 256)
            return bytes(changed)


def port_towards(server: int, proxy: int) -> int:
    """The port of the proxy at port `proxy` that leads to the server at this port of the loopback. Raises OSError."""
    with socket.socket() as asking:
        asking.connect(("127.0.0.1", proxy))
        asking.sendall(PORT.pack(server))
        return int(PORT.unpack(_exactly(asking, PORT.size))[0])


def _listening(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), backlog=128)


def _exactly(source: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        if not (more := source.recv(count - len(got))):
            raise ConnectionError("it was closed")
        got += more
    return got


def _thread(work: Callable[..., object], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def _shut(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
