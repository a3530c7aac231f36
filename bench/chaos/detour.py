"""python -m bench.chaos.detour PORT asyncrl VERB …: `asyncrl VERB …` whose TCP connections go through a proxy.

Those to Redis do not: only the queue has some, and it is started as ever.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import zmq

from bench.chaos.proxy import port_towards


def install(proxy: int) -> None:
    """For the rest of this process's life: sockets of ZeroMQ, and those of `socket.create_connection`.

    proxy: its port
    """
    connect, create = zmq.Socket.connect, socket.create_connection

    def connect_there(self: zmq.Socket[Any], address: str) -> Any:
        host, _, port = address.rpartition(":")
        if host.startswith("tcp://"):
            return connect(self, f"{host}:{port_towards(int(port), proxy)}")
        return connect(self, address)

    def create_there(address: tuple[str, int], *args: Any, **more: Any) -> socket.socket:
        return create((address[0], port_towards(address[1], proxy)), *args, **more)

    zmq.Socket.connect = connect_there  # type: ignore[method-assign, assignment]
    socket.create_connection = create_there  # type: ignore[assignment]


def main() -> int:
    port, name, *words = sys.argv[1:]
    install(int(port))
    from asyncrl.cli import main as run

    sys.argv = [name, *words]
    return run(words)


if __name__ == "__main__":
    sys.exit(main())
