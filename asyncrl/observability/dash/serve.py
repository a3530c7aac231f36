"""`asyncrl dash`: where the server listens, and who may read."""

from __future__ import annotations

import asyncio
import errno
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from aiohttp import web

from asyncrl.config.addresses import is_loopback
from asyncrl.errors import ConfigError
from asyncrl.observability.dash.page_data import PageData
from asyncrl.observability.dash.server import PageServer

PORT = 8420
ENDS_WITHIN_S = 0.1
TRIED = 20
"""Ports that are tried where none is given, from PORT on; then any free one."""


def serve(folders: Sequence[Path], host: str, port: int | None, announce: Callable[[str], None]) -> None:
    """Serve the page of some runs until SIGINT or SIGTERM. announce: is given the address once it can be opened.

    Off loopback every request needs a random token, which the address has. Raises ConfigError for a host or port that
    cannot be listened at.
    """
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    serve_until(folders, host, port, announce, ended)


def serve_until(
    folders: Sequence[Path],
    host: str,
    port: int | None,
    announce: Callable[[str], None],
    ended: threading.Event,
) -> None:
    """The same until `ended` is set, on any thread."""
    token = "" if is_loopback(host) else secrets.token_urlsafe(24)
    with listening_socket(host, port) as listener:
        shown = "[::1]" if host == "::1" else socket.gethostname() if host in ("0.0.0.0", "::") else host
        address = f"http://{shown}:{listener.getsockname()[1]}/{f'?token={token}' if token else ''}"
        server = PageServer([PageData(folder) for folder in folders], token)
        asyncio.run(_serve(server, listener, partial(announce, address), ended))


def listening_socket(host: str, port: int | None) -> socket.socket:
    """port: None for PORT, or the first free one behind it."""
    tried = [port] if port is not None else [*range(PORT, PORT + TRIED), 0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for each in tried:
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, each))
            listener.listen()
        except OSError as error:
            listener.close()
            if each == tried[-1] or error.errno != errno.EADDRINUSE:
                rule = f"cannot be listened at: {error.strerror or error}"
                raise ConfigError("--host, --port", f"{host}:{each}", rule, "choose another") from None
        else:
            return listener
    raise AssertionError("the last port returns or raises")


async def _serve(
    server: PageServer, listener: socket.socket, ready: Callable[[], None], ended: threading.Event
) -> None:
    runner = web.AppRunner(server.app(), access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    ready()
    while not ended.is_set():
        await asyncio.sleep(ENDS_WITHIN_S)
    await runner.cleanup()
