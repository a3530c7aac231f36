"""Processes forked from one that has imported torch and asyncrl, in place of processes that import them again.

    tests ──words, environment, descriptors──▸ parent ──fork──▸ asyncrl train ──fork──▸ queue, learner, generator
          ◂──exit code───────────────────────

The parent imports once per session, forks, and computes nothing: no thread and no lock is lost in a fork. A forked
process runs the words as `python` would, under their own command line, in a session of its own, and dies with its
parent. Without pidfd_open (other systems than Linux) processes are executed as usual.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

import disk_calls

from asyncrl.launch import supervise
from asyncrl.system.signals import die_with_parent

AVAILABLE = sys.platform == "linux" and hasattr(os, "pidfd_open")
LONGEST = 1 << 17
MOST_FDS = 16
STARTS_S, ENDS_S = 120.0, 20.0
ROOM = "-" * 4096
"""The last word of the parent's command line: forked processes write theirs over it."""

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
    """A process that the parent has forked: what tests and `Supervisor` use of subprocess.Popen."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        pass_fds: Sequence[int] = (),
        **like_popen: Any,
    ) -> None:
        self.args, self.returncode, self.stdout = list(args), None, None
        self._lock, self._printed = threading.Lock(), ""
        self._report, report = os.pipe()
        weakref.finalize(self, os.close, self._report)
        out, ours = _descriptor(stdout, 1), None
        if stdout == subprocess.PIPE:
            ours, out = os.pipe()
            self.stdout = open(ours, encoding="utf-8", errors="replace")  # noqa: SIM115
        err = out if stderr == subprocess.STDOUT else _descriptor(stderr, 2)
        nothing = os.open(os.devnull, os.O_RDONLY)
        request = {
            "words": self.args[1:],
            "env": dict(env or os.environ),
            "cwd": os.getcwd(),
            "fds": [*pass_fds],
        }
        parent = _parent()
        socket.send_fds(parent, [json.dumps(request).encode()], [report, nothing, out, err, *pass_fds])
        for fd in (report, nothing, *([out] if ours is not None else [])):
            os.close(fd)
        self.pid = int(_answer(parent))

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._report], [], [], 0)[0]:
                self.returncode = int(os.read(self._report, 16) or -signal.SIGKILL)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            select.select([self._report], [], [], left)
        return code

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
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def popen(args: Sequence[str], **more: Any) -> Any:
    """subprocess.Popen, or for `python -m asyncrl …` a forked process."""
    if AVAILABLE and list(args[:3]) == [sys.executable, "-m", "asyncrl"]:
        return ForkedProcess(args, **more)
    return subprocess.Popen(args, **more)


IN_TESTS = SimpleNamespace(**{**vars(subprocess), "Popen": popen})
"""In place of the module `subprocess` in a launcher that runs in the process of the tests."""


def _descriptor(stream: IO[Any] | int | None, otherwise: int) -> int:
    return otherwise if stream is None else stream if isinstance(stream, int) else stream.fileno()


def _answer(parent: socket.socket) -> bytes:
    answer = parent.recv(LONGEST)
    assert answer, "the process that forks for the tests has ended; its messages are above"
    return answer


@functools.cache
def _parent() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(STARTS_S)
    parent = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno()), ROOM],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        pass_fds=[theirs.fileno()],
        preexec_fn=die_with_parent,
    )
    theirs.close()
    atexit.register(lambda: (ours.close(), parent.wait(ENDS_S)))
    return ours


# In the parent.


def serve(requests: socket.socket) -> None:
    """Fork what is asked for, and report how each process ended, until the tests are gone."""
    ends: dict[int, tuple[int, int]] = {}
    while True:
        ready, _, _ = select.select([requests, *ends], [], [])
        for found in ready:
            if found is requests:
                data, fds, *_ = socket.recv_fds(requests, LONGEST, MOST_FDS)
                if not data:
                    return
                request, report = json.loads(data), fds.pop(0)
                pid = os.fork()
                if pid == 0:
                    become(request["words"], request["env"], request["cwd"], fds, request["fds"])
                for fd in fds:
                    os.close(fd)
                ends[os.pidfd_open(pid)] = pid, report
                requests.send(str(pid).encode())
            else:
                pid, report = ends.pop(found)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(report, str(code).encode())
                os.close(report)
                os.close(found)


# In a forked process.


def become(
    words: Sequence[str], env: Mapping[str, str], cwd: str, fds: Sequence[int], passed: Sequence[int]
) -> NoReturn:
    """Run the words that follow `python` in a command line. `fds`: stdin, stdout, stderr and what is to be `passed`."""
    code: Any = 1
    _forget_handlers()
    try:
        os.setsid()
        die_with_parent()
        _arrange(fds, [0, 1, 2, *passed])
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        _rename([sys.executable, *words])
        if disk_calls.VARIABLE in env:
            disk_calls.install_for(words, env[disk_calls.VARIABLE])
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
        supervise.subprocess = IN_FORKED  # type: ignore[assignment]
        sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
        _run(list(words))
        code = 0
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        with suppress(OSError):
            traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        with suppress(OSError):  # a log on a disk that is full
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code or 0)


def _forget_handlers() -> None:
    """As a program that is executed does: a launcher's handlers would take a signal to its child for one to itself."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """In a forked launcher: its children are forked from it, and not executed, if they run asyncrl."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *more: Any) -> None:
        _, pass_fds, cwd, env, _, _, _, *pipes = more[:13]
        if list(args[:3]) != [sys.executable, "-m", "asyncrl"]:
            super()._execute_child(args, executable, preexec_fn, *more)  # type: ignore[misc]
            return
        stdin, _, _, stdout, _, stderr = pipes
        self.pid = os.fork()
        if self.pid == 0:
            atexit._clear()  # what the launcher does at its end is not for its children
            preexec_fn()
            become(args[1:], env, cwd or os.getcwd(), [stdin, stdout, stderr, *pass_fds], list(pass_fds))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


IN_FORKED = SimpleNamespace(**{**vars(subprocess), "Popen": ForkingPopen})
"""In place of the module `subprocess` in a launcher that was forked itself."""


def _arrange(fds: Sequence[int], targets: Sequence[int]) -> None:
    """Each descriptor under its number; all others are closed."""
    most = max([*targets, *fds]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, most) for fd in fds]
    for fd, target in zip(moved, targets, strict=True):
        os.dup2(fd, target, inheritable=True)
    for low, high in zip([*sorted(targets)], [*sorted(targets)[1:], 1 << 16], strict=True):
        os.closerange(low + 1, high)


def _rename(words: Sequence[str]) -> None:
    """The command line that others see: written over the one with which the parent was started."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = "\0".join(words).encode()[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def _run(words: list[str]) -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    match words:
        case ["-m", module, *more]:
            sys.argv, sys.path[0] = ["-m", *more], os.getcwd()
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *more]:
            sys.argv, sys.path[0] = ["-c", *more], os.getcwd()
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case [file, *more]:
            sys.argv, sys.path[0] = [file, *more], str(Path(file).parent.resolve())
            runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    for name in PRELOADED:
        __import__(name)
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
