"""A Redis that is killed and replaced: a primary, its replica, and a sentinel that promotes the replica."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

from asyncrl.errors import DeadlineError
from asyncrl.system.signals import die_with_parent

STARTS_S = 30.0
NAME = "main"

DOWN_MS = 1000
"""A primary that is silent for so long is replaced."""

NODE = """\
port {port}
bind 127.0.0.1
dir {folder}
save ""
appendonly yes
appendfsync always
repl-diskless-sync-delay 0
"""

SENTINEL = """\
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor {name} 127.0.0.1 {primary} 1
sentinel down-after-milliseconds {name} {down_ms}
sentinel failover-timeout {name} 5000
"""


class RedisPair:
    """Three processes on free ports of the loopback; `url` is that of the sentinel.

    FileNotFoundError if there is no redis-server here.
    """

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise FileNotFoundError("redis-server is missing; `make redis` installs it")
        self._program, self._folder = program, folder
        sentinel, primary, replica = self._ports = _free_ports(3)
        self.url = f"redis+sentinel://127.0.0.1:{sentinel}/{NAME}/0"
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for port in (primary, replica):
            self._write(port, NODE.format(port=port, folder=self.folder_of(port)))
        self._start(primary)
        self._start(replica, "--replicaof", "127.0.0.1", str(primary))
        self._until(lambda: _has_replica(primary), "a replica that has all")
        words = {"port": sentinel, "folder": self.folder_of(sentinel), "primary": primary}
        self._write(sentinel, SENTINEL.format(name=NAME, down_ms=DOWN_MS, **words))
        self._start(sentinel, "--sentinel")
        self._sentinel = redis.Redis(port=sentinel, socket_timeout=1.0)
        self._until(lambda: bool(self._sentinel.sentinel_slaves(NAME)), "a sentinel that knows the replica")

    @property
    def primary(self) -> int:
        """The port of the one that the sentinel names now."""
        address: Any = self._sentinel.sentinel_get_master_addr_by_name(NAME)
        return int(address[1])

    @property
    def primary_pid(self) -> int:
        return self._processes[self.primary].pid

    @property
    def replica_pid(self) -> int:
        (replica,) = {*self._ports[1:]} - {self.primary}
        return self._processes[replica].pid

    def kill(self) -> int:
        """SIGKILL to the primary. Returns its port, for `start`."""
        port = self.primary
        self._processes[port].kill()
        self._processes[port].wait()
        return port

    def start(self, port: int) -> None:
        """Again, with the data of before: as a replica, if another one is the primary by now."""
        primary = self.primary
        self._start(port, *(() if port == primary else ("--replicaof", "127.0.0.1", str(primary))))

    def failovers(self) -> int:
        """How often the sentinel has put another one in the place of the primary."""
        state: Any = self._sentinel.sentinel_master(NAME)
        return int(state["config-epoch"])

    def until_whole(self) -> None:
        """Returns once the primary has a replica. DeadlineError if it gets none."""
        self._until(lambda: _has_replica(self.primary), "a primary with a replica")

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def folder_of(self, port: int) -> Path:
        """Its configuration, data and log."""
        return self._folder / str(port)

    def _write(self, port: int, config: str) -> None:
        """Into a file, which sentinels rewrite: a promoted replica is a primary when it starts again."""
        self.folder_of(port).mkdir(parents=True, exist_ok=True)
        (self.folder_of(port) / "redis.conf").write_text(config, encoding="utf-8")

    def _start(self, port: int, *words: str) -> None:
        command = [self._program, str(self.folder_of(port) / "redis.conf"), *words]
        with (self.folder_of(port) / "log").open("ab") as log:
            self._processes[port] = subprocess.Popen(
                command, stdout=log, stderr=log, preexec_fn=die_with_parent
            )
        self._until(lambda: _answers(port), "an answer")

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + STARTS_S
        while time.monotonic() < until:
            with suppress(redis.RedisError):
                if holds():
                    return
            time.sleep(0.02)
        raise DeadlineError("bench.chaos", f"redis-server (logs in {self._folder})", what, STARTS_S)


def _answers(port: int) -> bool:
    with redis.Redis(port=port) as client:
        return bool(client.ping())


def _has_replica(port: int) -> bool:
    """Whether a replica has all that this one has, so that WAIT returns."""
    with redis.Redis(port=port) as client:
        return int(client.wait(1, 100)) > 0


def _free_ports(count: int) -> Sequence[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(one.getsockname()[1]) for one in listeners]
    finally:
        for one in listeners:
            one.close()
