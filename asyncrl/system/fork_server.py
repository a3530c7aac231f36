"""Forks the processes of a run from one that has imported torch and transformers, which takes each of them seconds.

    launcher ──command, environment, descriptors──▸ fork server ──fork──▸ between ──fork──▸ process
             ◂──its id, and from then on its end as of any child──────────────────────────────┘

The server imports while the launcher checks the configuration. It computes nothing and has one thread, so that a fork
loses no thread and no lock; otherwise, or once it has CUDA's driver, it refuses, and the launcher executes its
processes. The process between ends at once, and the launcher inherits the process (as a subreaper of Linux): the server
may die, and none of those that it has forked dies with it. A process that is to start further ones gets a server of
its own, forked from this one.

A forked process runs its command as a new interpreter would: with its own environment, descriptors, session, name and
random numbers. These it has from the server: the search path and the mask of new files as they were when the server
began; one thread of numpy's BLAS, whatever the variables are (torch's threads follow them).
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import logging
import os
import resource
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

from setproctitle import setproctitle, setthreadtitle

from asyncrl.system.signals import die_with, inheriting

log = logging.getLogger(__name__)

AVAILABLE = sys.platform == "linux"
LONGEST, MOST_FDS = 1 << 18, 32
FORK_S = 20.0
"""Longest time that one fork may take."""

REAP_S = 1.0

READY, GO = b"ready", b"go"
THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
OF_SERVER = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
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


_forking = threading.Lock()
"""Of all servers: while one forks, this process inherits."""


class ForkServer:
    """A launcher's end of its fork server.

    began: when, in seconds since 1970
    requests: the connection to it · process: the server, where this process has executed it
    """

    def __init__(self, requests: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._requests, self._process = requests, process
        self._waiting = threading.Lock()
        self.used = False
        """Whether it was asked for a process."""
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

    def _fails(self, why: str) -> bool:
        self.failure = why
        self._requests.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        return False


def _reap(launcher: socket.socket) -> None:
    """A process that was forked too late ends by itself, for want of a GO. The connection ends if there is none."""
    with launcher, suppress(OSError, ValueError):
        launcher.settimeout(REAP_S)
        pid = int(launcher.recv(LONGEST))
        launcher.close()
        os.waitpid(pid, 0)


_own: ForkServer | None = None
_own_is_of: tuple[Sequence[str], Mapping[str, str]] | None = None
"""The modules and variables with which this process has begun it."""


def own_server(modules: Sequence[str], env: Mapping[str, str]) -> ForkServer | None:
    """The fork server of this process: one that it was forked with, or has begun before, unless that has failed, or was
    for a run with other modules or variables; else one that begins to import `modules` now. None on other systems than
    Linux, and where OpenMP binds to cores.

    env: its variables, beside those of this process
    """
    global _own, _own_is_of
    now = list(modules), {**os.environ, **env}
    if _own is not None and _own.lives and (not _own.used or _own_is_of in (None, now)):
        return _own
    if not AVAILABLE or any(name in now[1] for name in BOUND):
        return None
    if _own is not None:
        _own.end()
    _own_is_of = now
    _own = ForkServer.execute([sys.executable, "-m", "asyncrl.system.fork_server", ",".join(modules)], now[1])
    return _own


# ---------------------------------------------------------------------- in the server


def main(modules: Sequence[str], requests: socket.socket) -> None:
    """Import, fork what is asked for, and in each forked process run its command."""
    setproctitle("asyncrl fork server")
    atexit.register(end_at_once)  # before all others, and so called after them
    gc.disable()  # a sixth of the time
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # the process that needs it has a log for its traceback
        requests.send(f"{type(error).__name__}: {error}".encode()[:LONGEST])
        return
    gc.freeze()  # forked processes share the memory of all that is there, as long as nothing counts it
    gc.enable()
    requests.send(_unsafe().encode() or READY)
    words = serve(requests).words
    with noting_code():
        run(words)


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
    name(request.words)
    draw_anew()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads_of(request.env))
    return None


def name(words: Sequence[str]) -> None:
    """As a process with this command line is named to others."""
    line = " ".join([sys.executable, *words])
    setproctitle(os.fsencode(line).decode(errors="replace"))
    setthreadtitle(Path(sys.executable).name)


def draw_anew() -> None:
    """Global generators of random numbers begin where no other process does, as they do where they are imported. That
    of Python sees to it itself."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


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
    numbers, most = sorted(places), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    for low, high in zip(numbers, [*numbers[1:], most], strict=True):
        os.closerange(low + 1, high)


def threads_of(env: Mapping[str, str]) -> int:
    """The threads with which torch would begin.

    >>> threads_of({"OMP_NUM_THREADS": "3,1"}), threads_of({"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "2"})
    (3, 2)
    >>> threads_of({}) == len(os.sched_getaffinity(0))
    True
    """
    given = (env.get(variable, "").partition(",")[0] for variable in THREADS)
    return next((int(n) for n in given if n.isdecimal() and int(n)), len(os.sched_getaffinity(0)))


_code: int | None = None
"""With which this forked process ends; None: by a signal, or it is none."""


@contextmanager
def noting_code() -> Iterator[None]:
    global _code
    try:
        yield
        _code = 0
    except SystemExit as ended:
        _code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    except Exception:
        _code = 1
        raise


def end_at_once() -> None:
    """The last act of a forked process, whose threads have ended and which has printed its error: to take apart all
    that was imported would take a second."""
    if _code is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(_code & 0xFF)


def run(words: Sequence[str]) -> None:
    """As `python` runs them. Raises what the module raises, SystemExit above all."""
    option, module, *more = words
    assert option == "-m", words
    sys.argv = [module, *more]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    from asyncrl.system import fork_server  # this module runs under another name

    fork_server.main(sys.argv[1].split(","), socket.socket(fileno=int(sys.argv[2])))
