"""Processes that the tests start are forked from one that has imported torch and asyncrl, by the fork server of runs
(asyncrl/system/fork_server.py), once per session. Its forked processes fork theirs in turn.

Beside `-m asyncrl …` it runs files and code. Elsewhere than on Linux processes are executed.
"""

from __future__ import annotations

import atexit
import functools
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import disk_calls

from asyncrl.system import forking
from asyncrl.system.fork_server import AVAILABLE, ForkServer
from bench.network.hosts import enter

__all__ = ["AVAILABLE", "ForkedProcess", "own_server"]

STARTS_S = 120.0

HOST = "ASYNCRL_TESTS_HOST"
"""Set to the id of a process, a forked process moves to its host (bench/network/hosts.py) before it runs anything."""

PRELOADED = (
    "asyncrl.cli",
    "asyncrl.generator.process",
    "asyncrl.generator.engines.transformers.transformers_engine",
    "asyncrl.launch.local_run",
    "asyncrl.launch.preflight",
    "asyncrl.launch.queue_process",
    "asyncrl.learner.backends.fsdp.fsdp",
    "asyncrl.learner.process",
    "asyncrl.pool.process",
    "asyncrl.tasks.addition",
    "transformers.models.qwen2.modeling_qwen2",
)


class ForkedProcess:
    """What tests use of subprocess.Popen."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        **like_popen: Any,
    ) -> None:
        self.args, self.stdout, self._printed = list(args), None, ""
        out, ours = _descriptor(stdout, 1), None
        if stdout == subprocess.PIPE:
            ours, out = os.pipe()
            self.stdout = open(ours, encoding="utf-8", errors="replace")  # noqa: SIM115
        err = out if stderr == subprocess.STDOUT else _descriptor(stderr, 2)
        with open(os.devnull, "rb") as nothing:
            places = {0: nothing.fileno(), 1: out, 2: err}
            server = _server()
            process = server.fork(self.args, env or os.environ, places, serves=True)
        assert process is not None, server.failure
        if ours is not None:
            os.close(out)
        self._process, self.pid = process, process.pid
        self._end = os.pidfd_open(self.pid)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._end], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.wait()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        if self.stdout is not None and not self.stdout.closed:
            read: list[str] = []
            reading = threading.Thread(target=lambda: read.append(self.stdout.read()), daemon=True)
            reading.start()
            reading.join(timeout)
            if reading.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.stdout.close()
            self._printed += read[0]
        self.wait(timeout)
        return self._printed, None

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        if hasattr(self, "_end"):
            os.close(self._end)


def _descriptor(stream: IO[Any] | int | None, otherwise: int) -> int:
    return otherwise if stream is None else stream if isinstance(stream, int) else stream.fileno()


def own_server(modules: Sequence[str], env: Mapping[str, str]) -> ForkServer | None:
    """That of a launcher which runs in the process of the tests."""
    return _server() if AVAILABLE else None


@functools.cache
def _server() -> ForkServer:
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_WAIT_POLICY": "PASSIVE"}
    server = ForkServer.execute([sys.executable, __file__], {**os.environ, **own})
    assert server.wait_ready(STARTS_S), server.failure
    atexit.register(server.end)
    return server


def run(words: Sequence[str]) -> None:
    """In a forked process: as `python` runs the words."""
    variables = os.environ
    if (host := variables.get(HOST)) is not None:
        enter(int(host))
    if disk_calls.VARIABLE in variables:
        disk_calls.install_for(words, variables[disk_calls.VARIABLE])
    sys.path[:0] = [
        path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path
    ]
    match list(words):
        case ["-m", *_]:
            sys.path[0] = os.getcwd()
            _run_module(words)
        case ["-c", code, *more]:
            sys.argv, sys.path[0] = ["-c", *more], os.getcwd()
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case [file, *more]:
            sys.argv, sys.path[0] = [file, *more], str(Path(file).parent.resolve())
            runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    _run_module, forking.run = forking.run, run
    forking.main(PRELOADED, socket.socket(fileno=int(sys.argv[1])))
