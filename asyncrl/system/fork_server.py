"""Forks the processes of a run from one that has imported torch and transformers, which takes each of them seconds.

    launcher ──command, environment, descriptors──▸ fork server ──fork──▸ between ──fork──▸ process
             ◂──its id, and from then on its end as of any child──────────────────────────────┘

The server imports while the launcher checks the configuration. It computes nothing and has one thread, so that a fork
loses no thread and no lock; otherwise, or once it has CUDA's driver, it refuses, and the launcher executes its
processes. The process between ends at once, and the launcher inherits the process (as a subreaper of Linux): the server
may die, and none of those that it has forked dies with it. A process that is to start further ones gets a server of
its own, forked from this one.

A forked process runs its command as a new interpreter would: with its own environment, descriptors, session, name and
random numbers. `forking.py` is the server, and has the exceptions.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from asyncrl.system.signals import die_with, inheriting

log = logging.getLogger(__name__)

AVAILABLE = sys.platform == "linux"
LONGEST = 1 << 18
FORK_S = 20.0
"""Longest time that one fork may take."""

REAP_S = 1.0

READY, GO = b"ready", b"go"
OF_SERVER = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
"""With more, numpy begins threads as it is imported."""

BOUND = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables with which OpenMP binds a process to cores as it is loaded: all forked processes would share them."""


@dataclass(frozen=True, slots=True)
class Request:
    """A process that is wanted.

    words: of its command line, behind the interpreter · numbers: of its descriptors, in the order in which they come
    launcher: the process that waits for it · serves: whether it gets a fork server of its own
    """

    words: list[str]
    env: dict[str, str]
    cwd: str
    numbers: list[int]
    launcher: int
    serves: bool


class ForkedProcess:
    """A process that was forked for this one, which is its parent now: as much of subprocess.Popen as `Supervisor`
    uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._lock = threading.Lock()
        self._code: int | None = None

    def poll(self) -> int | None:
        with self._lock:
            if self._code is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # somebody else has waited for it; subprocess assumes 0 as well
                    pid, status = self.pid, 0
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            with suppress(ChildProcessError):  # `poll` was faster
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return code

    def send_signal(self, sig: int) -> None:
        with self._lock:
            if self._code is None:
                os.kill(self.pid, sig)


_forking = threading.Lock()
"""Of all servers: while one forks, this process inherits."""


class ForkServer:
    """A launcher's end of its fork server.

    began: when, in seconds of the monotonic clock
    requests: the connection to it · process: the server, where this process has executed it
    """

    def __init__(self, requests: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._requests, self._process = requests, process
        self._waiting = threading.Lock()
        self.used = False
        """Whether it was asked for a process."""
        self._ready, self.began = process is None, time.monotonic()
        self.failure = ""
        """Why it forks nothing, from then on."""

    @classmethod
    def execute(cls, command: Sequence[str], env: Mapping[str, str]) -> ForkServer:
        """command: of the server; it gets the number of a descriptor as its last word"""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env={**env, **OF_SERVER},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                preexec_fn=die_with(os.getpid()),
            )
        return cls(ours, process)

    @property
    def ready(self) -> bool:
        return self._ready and not self.failure

    @property
    def lives(self) -> bool:
        return not self.failure and (self._process is None or self._process.poll() is None)

    def wait_ready(self, seconds: float) -> bool:
        """Wait until it has imported its modules, or has failed."""
        with self._waiting:
            if not self._ready and not self.failure:
                try:
                    self._requests.settimeout(seconds)
                    said = self._requests.recv(LONGEST)
                except TimeoutError:
                    said = f"it has not imported its modules within {seconds:g} s".encode()
                except OSError as error:
                    said = str(error).encode()
                self._ready = said == READY
                if not self._ready:
                    self._fails(said.decode(errors="replace") or "it has ended")
        return self.ready

    def fork(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        fds: Mapping[int, int],
        *,
        serves: bool = False,
    ) -> ForkedProcess | None:
        """A process with this command, `python -m …`; None, if the server cannot fork it: no longer if it has failed,
        and not this one if the request cannot be sent.

        fds: number of each of its descriptors → one of this process · serves: whether it gets a server of its own
        """
        self.used = True
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, _forking, inheriting():
            try:
                request = Request([*command[1:]], {**env}, os.getcwd(), [*fds], os.getpid(), serves)
                self._ask(request, [theirs.fileno(), *fds.values()])
            except OSError as error:
                log.warning("%s is executed, since no request to fork it can be made: %s", command, error)
                return None
            theirs.close()
            try:
                return self._new_process(ours)
            except (OSError, ValueError) as error:
                self._fails(str(error) or type(error).__name__)
                _reap(ours)
                return None

    def _ask(self, request: Request, fds: Sequence[int]) -> None:
        self._requests.settimeout(FORK_S)
        try:
            socket.send_fds(self._requests, [json.dumps(asdict(request)).encode()], fds)
        except ConnectionError:
            self._fails("it has ended")
            raise

    def _new_process(self, new: socket.socket) -> ForkedProcess:
        """new: the connection to it. Raises OSError or ValueError if there is none, or it is no child of this one."""
        if (refusal := self._requests.recv(LONGEST)) != READY:
            raise ChildProcessError(refusal.decode(errors="replace") or "it has ended")
        new.settimeout(FORK_S)
        process = ForkedProcess(int(new.recv(LONGEST)))
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        new.send(GO)
        return process

    def end(self) -> None:
        """Those that it has forked go on."""
        self._fails("it was ended")

    def _fails(self, why: str) -> None:
        self.failure = why
        self._requests.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _reap(launcher: socket.socket) -> None:
    """A process that was forked too late ends by itself, for want of a GO. The connection ends if there is none."""
    with launcher, suppress(OSError, ValueError):
        launcher.settimeout(REAP_S)
        pid = int(launcher.recv(LONGEST))
        launcher.close()
        os.waitpid(pid, 0)


own: ForkServer | None = None
"""That of this process; `own_server` has it."""

_own_is_of: tuple[Sequence[str], Mapping[str, str]] | None = None
"""The modules and variables with which this process has begun it."""


def own_server(modules: Sequence[str], env: Mapping[str, str]) -> ForkServer | None:
    """The fork server of this process: one that it was forked with, or has begun before, unless that has failed, or was
    for a run with other modules or variables; else one that begins to import `modules` now. None on other systems than
    Linux, and where OpenMP binds to cores.

    env: its variables, beside those of this process
    """
    global own, _own_is_of
    now = list(modules), {**os.environ, **env}
    if own is not None and own.lives and (not own.used or _own_is_of in (None, now)):
        return own
    if not AVAILABLE or any(name in now[1] for name in BOUND):
        return None
    if own is not None:
        own.end()
    _own_is_of = now
    own = ForkServer.execute([sys.executable, "-m", "asyncrl.system.forking", ",".join(modules)], now[1])
    return own
