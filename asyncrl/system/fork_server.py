"""Forks the processes of a run from one that has imported torch and transformers, which takes each of them seconds.

    launcher ──command, environment, descriptors──▸ fork server ──fork──▸ between ──fork──▸ process
             ◂──its id, and from then on its end as of any child──────────────────────────────┘

The server imports while the launcher checks the configuration. It computes nothing and has one thread, so that a fork
loses no thread and no lock; otherwise, or once it has CUDA's driver, it refuses, and the launcher executes its
processes. The process between ends at once, and the launcher inherits the process (as a subreaper of Linux): the server
may die, and none of those that it has forked dies with it. A process that is to start further ones gets a server of
its own, forked from this one.

A forked process runs its command as a new interpreter would: with its own environment, descriptors, session and name.
Threads of OpenMP are the exception: their number is set by torch, since OpenMP has read its variables already.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from setproctitle import setproctitle

from asyncrl.system.signals import die_with

AVAILABLE = sys.platform == "linux"
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
LONGEST, MOST_FDS = 1 << 18, 32
FORK_S = 20.0
"""Longest time that one fork may take."""

READY, GO = b"ready", b"go"
THREADS = "OMP_NUM_THREADS"
OF_SERVER = {THREADS: "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
"""With more, numpy begins threads as it is imported."""

BOUND = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables with which OpenMP binds a process to cores as it is loaded: all forked processes would share them."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a process is to be.

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


class ForkServer:
    """A launcher's end of its fork server. Used from one thread at a time.

    began: when, in seconds since 1970
    requests: the connection to it · process: the server, where this process has executed it
    """

    def __init__(self, requests: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._requests, self._process = requests, process
        self._ready, self.began = process is None, time.time()
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
        if not self._ready and not self.failure:
            self._requests.settimeout(seconds)
            try:
                said = self._requests.recv(LONGEST)
            except TimeoutError:
                return self._fails(f"it has not imported its modules within {seconds:g} s")
            except OSError as error:
                return self._fails(str(error))
            self._ready = said == READY
            if not self._ready:
                return self._fails(said.decode(errors="replace") or "it has ended")
        return self.ready

    def fork(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        fds: Mapping[int, int],
        *,
        serves: bool = False,
    ) -> ForkedProcess | None:
        """A process with this command, `python -m …`; None, if the server cannot fork it.

        fds: number of each of its descriptors → one of this process
        """
        words, numbers = list(command[1:]), list(fds)
        request = Request(words, dict(env), os.getcwd(), numbers, os.getpid(), serves)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, _inheriting():
            try:
                ours.settimeout(FORK_S)
                self._requests.settimeout(FORK_S)
                data = json.dumps(asdict(request)).encode()
                socket.send_fds(self._requests, [data], [theirs.fileno(), *fds.values()])
                theirs.close()
                if (refusal := self._requests.recv(LONGEST)) != READY:
                    self._fails(refusal.decode(errors="replace") or "it has ended")
                    return None
                process = ForkedProcess(int(ours.recv(LONGEST)))
                ours.send(GO)
                return process
            except (OSError, ValueError) as error:  # the process ends by itself, for want of a GO
                self._fails(str(error) or type(error).__name__)
                return None

    def end(self) -> None:
        """Those that it has forked go on."""
        self._fails("it was ended")

    def _fails(self, why: str) -> bool:
        self.failure = why
        self._requests.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        return False


_own: ForkServer | None = None


def own_server(modules: Sequence[str], env: Mapping[str, str]) -> ForkServer | None:
    """The fork server of this process: one that it was forked with, or has begun before, unless that has failed; else
    one that begins to import `modules` now. None on other systems than Linux, and where OpenMP binds to cores.

    env: its variables, beside those of this process
    """
    global _own
    variables = {**os.environ, **env}
    if _own is not None and _own.lives:
        return _own
    if not AVAILABLE or any(name in variables for name in BOUND):
        return None
    code = [sys.executable, "-m", "asyncrl.system.fork_server", ",".join(modules)]
    _own = ForkServer.execute(code, variables)
    return _own


@contextmanager
def _inheriting() -> Iterator[None]:
    """Inside, this process becomes the parent of those whose own parent ends, below it."""
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, before.value)


# ---------------------------------------------------------------------- in the server


def main(modules: Sequence[str], requests: socket.socket) -> None:
    """Import, fork what is asked for, and in each forked process run its command."""
    setproctitle("asyncrl fork server")
    gc.disable()  # a sixth of the time
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # the process that needs it has a log for its traceback
        requests.send(f"{type(error).__name__}: {error}".encode()[:LONGEST])
        return
    gc.freeze()  # forked processes share the memory of all that is there, as long as nothing counts it
    gc.enable()
    requests.send(READY)
    run(serve(requests).words)


def serve(requests: socket.socket) -> Request:
    """Fork what is asked for until the launcher is gone. Returns in each forked process."""
    while True:
        data, fds, *_ = socket.recv_fds(requests, LONGEST, MOST_FDS)
        if not data:
            sys.exit(0)
        request = Request(**json.loads(data))
        refusal = _unsafe()
        if not refusal and _forked_twice():
            requests.close()
            serving = become(request, fds)
            if serving is None:
                return request
            requests = serving
            continue
        for fd in fds:
            os.close(fd)
        requests.send(refusal.encode() or READY)


def _unsafe() -> str:
    """Why a fork would lose something; empty: it would not."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"it has {threads} threads"
    if "/libcuda.so" in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"):
        return "it has loaded CUDA's driver"
    return ""


def _forked_twice() -> bool:
    """Whether this is the new process. Its parent, between the two, has ended when this returns in the server."""
    between = os.fork()
    if between:
        if os.waitpid(between, 0)[1]:
            raise ChildProcessError("the process between could not fork")
        return False
    try:
        new = os.fork()
    except OSError:
        os._exit(1)
    if new:
        os._exit(0)
    return True


# ---------------------------------------------------------------------- in a forked process


def become(request: Request, fds: Sequence[int]) -> socket.socket | None:
    """Take the place of the process that was asked for. fds: the connection to the launcher, and those of `request`.

    Returns None; but in a server of that process, which is forked here, the connection to it.
    """
    global _own
    os.setsid()
    with socket.socket(fileno=fds[0]) as launcher:
        launcher.send(str(os.getpid()).encode())
        if launcher.recv(len(GO)) != GO:
            os._exit(1)
    die_with(request.launcher)()
    places, own = dict(zip(request.numbers, fds[1:], strict=True)), max(request.numbers) + 1
    if request.serves:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        if not os.fork():
            die_with(parent)()
            ours.close()
            return _alone(theirs)
        places[own] = ours.detach()
        theirs.close()
    arrange(places)
    if request.serves:
        os.set_inheritable(own, False)
        _own = ForkServer(socket.socket(fileno=own))
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    setproctitle(" ".join([sys.executable, *request.words]))
    atexit.register(gc.unfreeze)  # libraries look at the end for objects that are left
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads_of(request.env))
    return None


def _alone(requests: socket.socket) -> socket.socket:
    """The connection, as the only descriptor of this process beside those of no input and no output."""
    nothing = os.open(os.devnull, os.O_RDWR)
    arrange({**dict.fromkeys(range(3), nothing), 3: requests.detach()})
    return socket.socket(fileno=3)


def arrange(places: Mapping[int, int]) -> None:
    """Each descriptor under its number, all others closed. places: number → descriptor"""
    above = max([*places, *places.values()]) + 1
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, above) for number, fd in places.items()}
    for number, fd in moved.items():
        os.dup2(fd, number)
    numbers = sorted(places)
    for low, high in zip(numbers, [*numbers[1:], 1 << 16], strict=True):
        os.closerange(low + 1, high)


def threads_of(env: Mapping[str, str]) -> int:
    """The threads with which OpenMP would begin.

    >>> threads_of({"OMP_NUM_THREADS": "3,1"}), threads_of({}) == len(os.sched_getaffinity(0))
    (3, True)
    """
    first = env.get(THREADS, "").partition(",")[0]
    return int(first) if first.isdecimal() and int(first) else len(os.sched_getaffinity(0))


def run(words: Sequence[str]) -> None:
    """As `python` runs them. Raises what the module raises, SystemExit above all."""
    option, module, *more = words
    assert option == "-m", words
    sys.argv = [module, *more]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    from asyncrl.system import fork_server  # this module runs under another name

    fork_server.main(sys.argv[1].split(","), socket.socket(fileno=int(sys.argv[2])))
