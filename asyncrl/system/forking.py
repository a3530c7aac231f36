"""The other end of a fork server (fork_server.py): what it imports, how it forks, and what a forked process becomes.

    python -m asyncrl.system.forking MODULE,MODULE… DESCRIPTOR

The process between server and forked process ends at once, so that the launcher inherits the latter. What a forked
process has from the server, and not from its launcher: the search path and the mask of new files as they were when the
server began; one thread of numpy's BLAS, whatever the variables are (torch's threads follow them).
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from setproctitle import setproctitle, setthreadtitle

from asyncrl.system import fork_server
from asyncrl.system.cores import cores
from asyncrl.system.fork_server import GO, LONGEST, READY, ForkServer, Request
from asyncrl.system.signals import die_with

MOST_FDS = 32
THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")


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
            os._exit(0)  # at once, see end_at_once
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


def become(request: Request, fds: Sequence[int]) -> socket.socket | None:
    """Take the place of the process that was asked for. fds: the connection to the launcher, and those of `request`.

    Returns None; but in a server of that process, which is forked here, the connection to it.
    """
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
        fork_server.own = ForkServer(socket.socket(fileno=own))
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
    """Global generators of random numbers begin where no other process does, as they do where they are imported.
    Python's own sees to it itself."""
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
    return next((int(n) for n in given if n.isdecimal() and int(n)), cores())


_code: int | None = None
"""With which this forked process ends; None: by a signal, or it is none."""


@contextmanager
def noting_code() -> Iterator[None]:
    """Inside, the module of the process runs: with its end, `end_at_once` knows the exit code."""
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
    main(sys.argv[1].split(","), socket.socket(fileno=int(sys.argv[2])))
