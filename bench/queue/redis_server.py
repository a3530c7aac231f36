"""A Redis of its own, on a Unix socket, that keeps nothing on disk."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STARTS_S = 20.0


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Its path. FileNotFoundError if there is no redis-server here."""
    program = shutil.which("redis-server")
    if program is None:
        raise FileNotFoundError("redis-server is missing; `make redis` installs it")
    path = folder / "redis.socket"
    words = [
        "--port",
        "0",
        "--unixsocket",
        str(path),
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        str(folder),
    ]
    process = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)
    try:
        _wait_for(path)
        yield str(path)
    finally:
        process.terminate()
        process.wait()


def _wait_for(path: Path) -> None:
    until = time.monotonic() + STARTS_S
    with socket.socket(socket.AF_UNIX) as probe:
        while True:
            try:
                return probe.connect(str(path))
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)
