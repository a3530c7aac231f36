"""The addresses of this machine at which others reach it."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"


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
