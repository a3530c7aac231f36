"""Process 1 of a sandbox. It starts the program, measures time, reads output, and kills.

    stdin: {limits, program, inputs, tests: how many}, then {texts, entry}      stdout: [result of each run, …]
        ▾                                                                          ▴
    process 1 ── without tests: fork per input ──▸ program.run ── output ──────────┤
              └─ with tests: template.py ──▸ program.serve_tests ◂── requests ── judge.py ┘

Process 1 has no rights and receives no signal from inside (`confinement.become_supervisor`). The processes that it
starts never hold a pipe that leads outside.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import site
import sys
import time
from typing import Any

from . import confinement, frames, program
from .system import exit_after, write_all

Job = dict[str, Any]

F_ADD_SEALS, ALL_SEALS = 1033, 0xF


def main(packages: list[str]) -> int:
    """packages: folders of installed packages. Returns the exit status of the sandbox."""
    os.umask(0o077)
    confinement.become_supervisor()
    sys.path[:] = sys.path[1:] + packages  # this package is for nobody else
    site.setquit()  # `exit` and `quit`, which programs use
    job = frames.received(0)
    if job["tests"]:
        result = [_judged(job)]
    else:
        deadline = time.monotonic() + job["limits"]["total_s"]
        result = [_run(job, given, deadline) for given in job["inputs"]]
    write_all(1, json.dumps(result).encode())
    return 0


def _judged(job: Job) -> Job:
    """The result of a program's tests. The template is made before this process has read them."""
    from .judge import Judge  # with tests alone: they take as long to import as all else
    from .template import Template

    limits = job["limits"]
    template = Template(job["program"], limits, job["tests"])
    tests = frames.received(0)
    outside = os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    memory = limits["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    confinement.forbid_calls()
    os.environ["HOME"] = "/"  # the other is the program's folder: no library reads its settings there
    result = Judge(template, limits["wall_s"], limits["total_s"]).judged(tests["texts"], tests["entry"])
    os.dup2(outside, 1)
    return {"out": "", "refused": None, **result}


def _run(job: Job, given: str, all_deadline: float) -> Job:
    """Start one program, and wait for its end."""
    limits = job["limits"]
    deadline = min(all_deadline, time.monotonic() + limits["wall_s"])
    output_read, output_write = os.pipe()
    stdin = os.memfd_create("stdin", os.MFD_ALLOW_SEALING)
    write_all(stdin, given.encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    fcntl.fcntl(stdin, F_ADD_SEALS, ALL_SEALS)  # no program writes into it: no limit counts that memory
    pid = os.fork()
    if pid == 0:
        os.dup2(stdin, 0)
        os.dup2(output_write, 1)
        exit_after(lambda: program.run(job["program"], limits))
    for end in (stdin, output_write):
        os.close(end)
    try:
        ended, out = _watch(pid, output_read, deadline, 1024 * limits["output_kb"])
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)  # its own children are now this process's
    finally:
        os.close(output_read)
    return {
        "ended": ended,
        "code": code,
        "out": out.decode(errors="replace"),
        "passed": None,
        "refused": None,
    }


def _watch(pid: int, pipe: int, deadline: float, most: int) -> tuple[str, bytes]:
    """Read the program's output until it ends or a limit is reached, then kill its process group.

    Returns:
        (reason of the end, output). The process is not reaped yet, so that its pid is not reused.
    """
    out, ended, dead = b"", "", os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    poll.register(dead, select.POLLIN)
    while not ended:
        ready = dict(poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))))
        if not ready:
            ended = "time"
        if pipe in ready:
            piece = os.read(pipe, 1 << 16)
            out += piece
            if not piece:
                poll.unregister(pipe)
            if len(out) > most:
                ended = "output"
        elif dead in ready:
            ended = "exit"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)  # if it had no group of its own yet
    os.close(dead)
    return ended, (out + _read_left(pipe, most))[:most]


def _read_left(pipe: int, most: int) -> bytes:
    """The bytes in a pipe, without waiting for more."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, most)
    except BlockingIOError:
        return b""
