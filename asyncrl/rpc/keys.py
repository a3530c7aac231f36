"""CURVE keys of a run: which processes may connect to its broker and to each other. Without keys the broker listens on
loopback only.

    DIR/server.key   for the broker     its key pair, and the public key of the peers that it admits
    DIR/client.key   for all others     their key pair, and the public key of the broker

A file holds `name = key` lines, keys in Z85. Both sides prove that they know their secret key, and everything
between them is encrypted (http://curvezmq.org). The broker admits the one client key that it was given.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from asyncrl.errors import ConfigError

SERVER_FILE, CLIENT_FILE = "server.key", "client.key"
PRIVATE = 0o600
KEY_BYTES = 40
"""Length of a key in Z85."""


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The keys of a broker. client: the public key of the peers that it admits."""

    path: str
    public: bytes
    secret: bytes
    client: bytes

    def serve(self, socket: zmq.Socket) -> None:
        """Before the socket is bound."""
        _set_own(socket, self.public, self.secret)
        socket.curve_server = True

    def admits(self, zap_request: Sequence[bytes]) -> bool:
        """Whether a ZAP request is about a holder of the client keys."""
        return _is_from(zap_request, self.client)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The keys of all others. server: the public key of the broker.

    Learners, generators and pools all hold these, so they use them among each other too: a process that serves others
    shows the same key pair, and admits no other.
    """

    path: str
    public: bytes
    secret: bytes
    server: bytes

    def connect_to_broker(self, socket: zmq.Socket) -> None:
        """Before the socket is connected."""
        _set_own(socket, self.public, self.secret)
        socket.curve_serverkey = self.server

    def serve(self, socket: zmq.Socket) -> None:
        """Before the socket is bound."""
        _set_own(socket, self.public, self.secret)
        socket.curve_server = True

    def connect(self, socket: zmq.Socket) -> None:
        """To a socket of another holder that serves. Before the socket is connected."""
        _set_own(socket, self.public, self.secret)
        socket.curve_serverkey = self.public

    def admits(self, zap_request: Sequence[bytes]) -> bool:
        """Whether a ZAP request is about a holder of the same keys."""
        return _is_from(zap_request, self.public)


def _set_own(socket: zmq.Socket, public: bytes, secret: bytes) -> None:
    socket.curve_publickey, socket.curve_secretkey = public, secret


def _is_from(zap_request: Sequence[bytes], public: bytes) -> bool:
    """ZAP 1.0: version, id, domain, address, identity, mechanism, credentials (https://rfc.zeromq.org/spec/27)."""
    return len(zap_request) == 7 and zap_request[5] == b"CURVE" and zap_request[6] == z85.decode(public)


def make_keys(folder: Path) -> None:
    """Write both files, readable by their owner only. ConfigError if there is one already."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    files = {
        SERVER_FILE: {"public": server_public, "secret": server_secret, "client": client_public},
        CLIENT_FILE: {"public": client_public, "secret": client_secret, "server": server_public},
    }
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in files:
        if (folder / name).exists():
            raise ConfigError(
                "keys", str(folder), f"{name} is there already", "remove both files, or name another folder"
            )
    for name, keys in files.items():
        text = "".join(f"{key} = {value.decode()}\n" for key, value in keys.items())
        with open(
            os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "w", encoding="ascii"
        ) as file:
            file.write(text)


def server_keys(folder: str | None) -> ServerKeys | None:
    """The keys in a folder, if one is given. ConfigError (key queue.keys) unless it is private and from `make_keys`."""
    if folder is None:
        return None
    path = Path(folder) / SERVER_FILE
    return ServerKeys(str(path), *_read(path, "public", "secret", "client"))


def client_keys(folder: str | None) -> ClientKeys | None:
    """The keys in a folder, if one is given. ConfigError (key queue.keys) unless it is private and from `make_keys`."""
    if folder is None:
        return None
    path = Path(folder) / CLIENT_FILE
    return ClientKeys(str(path), *_read(path, "public", "secret", "server"))


def _read(path: Path, *names: str) -> list[bytes]:
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is no key file"
        raise _bad(
            path, f"{path.name}: {reason}", f"make the folder with `asyncrl keys {path.parent}`"
        ) from None
    if mode & 0o077:
        raise _bad(path, f"others may read {path.name}", f"chmod 600 {path}")
    found = dict(line.split(" = ", 1) for line in text.splitlines() if " = " in line)
    keys = [found.get(name, "").strip().encode() for name in names]
    if any(len(key) != KEY_BYTES for key in keys):
        raise _bad(
            path, f"{path.name} is no key file", f"make the folder anew with `asyncrl keys {path.parent}`"
        )
    return keys


def _bad(path: Path, rule: str, remedy: str) -> ConfigError:
    return ConfigError("queue.keys", str(path.parent), rule, remedy)
