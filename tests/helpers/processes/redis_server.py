"""A real Redis on a free loopback port, for the tests that need one."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import missing
import pytest
import redis
from processes import free_port

from asyncrl.system.signals import die_with_parent

STARTS_S = 20.0


class RedisServer:
    """One process. It keeps its data in memory, unless `options` say more."""

    def __init__(self, folder: Path, *options: str) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip(missing.REDIS)
        self._program, self._folder, self._options = program, folder, options
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        """Again after `kill`: with the data of before, if the options say that they are kept."""
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        with (self._folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(
                [self._program, *words, *self._options], stdout=log, stderr=log, preexec_fn=die_with_parent
            )
        self.client = redis.Redis.from_url(self.url)
        until = time.monotonic() + STARTS_S
        while not self._answers():
            assert self.process.poll() is None, (self._folder / "redis.log").read_text()
            assert time.monotonic() < until, f"redis-server does not answer after {STARTS_S} s"
            time.sleep(0.02)

    def kill(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False
