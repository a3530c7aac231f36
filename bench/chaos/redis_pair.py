"""A Redis that keeps what it has answered, and is killed and started again."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import redis

from asyncrl.errors import DeadlineError
from asyncrl.system.signals import die_with_parent

STARTS_S = 30.0
LASTING = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")


class LastingRedis:
    """One process on a free port of the loopback. FileNotFoundError if there is no redis-server here."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise FileNotFoundError("redis-server is missing; `make redis` installs it")
        folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}/0"
        words = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder))
        self._command = [program, *words, *LASTING]
        self.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Also again, after `kill`. Returns once it answers, with the data of before."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, preexec_fn=die_with_parent)
        until = time.monotonic() + STARTS_S
        while time.monotonic() < until:
            with suppress(redis.RedisError), redis.Redis(port=self.port) as client:
                client.ping()
                return
            time.sleep(0.02)
        raise DeadlineError("bench.chaos", "redis-server", "an answer", STARTS_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
