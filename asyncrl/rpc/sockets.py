"""ZeroMQ sockets: frames without waiting, wake-ups of a thread that polls, heartbeats, handshakes.

`send` and `receive` do what pyzmq's `send_multipart` and `recv_multipart` do with NOBLOCK, in a good half of their
time: those make an enum of the flags of each frame.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncrl.rpc.keys import ClientKeys, ServerKeys

NOW = int(zmq.NOBLOCK)
MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
EVENTS, READABLE = int(zmq.EVENTS), int(zmq.POLLIN)

OPEN_FILES = 1 << 16

LARGEST_KEPT = (32 << 20) - (64 << 10)
"""Bytes of the largest block that glibc can be brought to keep for reuse (M_MMAP_THRESHOLD of mallopt(3))."""

ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""The address of libzmq's requests to admit the key of a peer (ZAP, https://rfc.zeromq.org/spec/27)."""

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def keep_freed_memory() -> None:
    """Let the memory of frames be used again: fresh pages cost more than the work on the bytes in them.

    glibc returns freed memory to the system once there are 128 KiB of it, until it has seen a larger block freed
    (mallopt(3), "dynamic mmap threshold"). A block that nobody writes to costs nothing. With another libc this does
    nothing.
    """
    bytes(LARGEST_KEPT)


def allow_open_files() -> None:
    """Raise the limit of this process: every peer of a server is an open file, and many shells allow 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def send(socket: zmq.Socket, frames: Sequence[Any]) -> None:
    """Send one message without copying large frames. Raises zmq.Again if there is no room for it."""
    for frame in frames[:-1]:
        socket.send(frame, MORE, copy=False)
    socket.send(frames[-1], NOW, copy=False)


def receive(socket: zmq.Socket) -> list[zmq.Frame]:
    """The frames of one message; none if no message is there."""
    events: Any = socket.get(EVENTS)
    if not events & READABLE:  # takes a third of the time in which an Again is raised
        return []
    try:
        frames = [socket.recv(NOW, copy=False)]
    except zmq.Again:  # the connection went in between
        return []
    while frames[-1].more:
        frames.append(socket.recv(NOW, copy=False))
    return frames


def events_of(monitor: zmq.Socket) -> Iterator[int]:
    """The events that a monitor socket has now."""
    while not monitor.closed:
        try:
            message = monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield int(parse_monitor_message(message)["event"])


class Wakeup:
    """Ends the poll of another thread. The other thread registers this object for POLLIN and finds `fileno()` ready."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        return self._receiver.fileno()

    def set(self) -> None:
        """From any thread or signal handler. Has no effect after `close`, or when many wake-ups wait already."""
        with suppress(OSError):
            self._sender.send(b"x")

    def clear(self) -> None:
        with suppress(OSError):
            self._receiver.recv(1 << 12)

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


class HandshakeGuard:
    """Admits peers with the right keys to a server socket, and counts the handshakes that failed.

    Without keys it only counts. ZAP has one address per context, so such a socket needs a context of its own.

    server: not bound yet
    """

    def __init__(self, server: zmq.Socket, keys: ServerKeys | ClientKeys | None) -> None:
        self._server, self._keys = server, keys
        self._zap = server.context.socket(zmq.REP)
        if keys is not None:
            self._zap.bind(ZAP_ADDRESS)
            keys.serve(server)
        self._failures = server.get_monitor_socket(HANDSHAKE_FAILED)

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._failures, zmq.POLLIN)

    def handle(self, ready: Mapping[Any, int]) -> int:
        """Answer a pending authentication request, if the poll found one.

        Returns how many handshakes have failed since the last call."""
        if self._zap in ready:
            request = self._zap.recv_multipart()
            admitted = self._keys is not None and self._keys.admits(request)
            self._zap.send_multipart(_zap_reply(request, admitted))
        return sum(1 for _ in events_of(self._failures)) if self._failures in ready else 0

    def close(self) -> None:
        """Before the server socket is closed. Idempotent."""
        if not self._server.closed:
            self._server.disable_monitor()
        self._failures.close()
        self._zap.close()


def _zap_reply(request: Sequence[bytes], admitted: bool) -> list[bytes]:
    request_id = request[1] if len(request) > 1 else b""
    status, text = (b"200", b"OK") if admitted else (b"400", b"unknown key")
    return [b"1.0", request_id, status, text, b"", b""]
