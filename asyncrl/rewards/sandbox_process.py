"""The processes inside the sandbox, which run one program. `sandbox.py` starts this file as a script.

    stdin: {limits, isolation, folder, program, tests, inputs}        stdout: [result of each run, …]
        ▾                                                                  ▴
    setup ─── fork ──▸ supervisor ─────────────────────────────────────────┘ ─── fork per run ──▸ child
      into namespaces,  makes files read-only but a folder in memory;              limits, no capabilities,
      then only waits   measures time, reads the output, kills                     forbidden calls; the program

The supervisor loads nothing that the child runs, and the child gets no pipe of the supervisor. This file is a program,
not a part of the package: it uses the standard library only.

Sources: namespaces(7), user_namespaces(7), mount_setattr(2), seccomp(2), getrlimit(2), prctl(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import secrets
import select
import signal
import struct
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

Job = dict[str, Any]

NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000
"""CLONE_NEWUSER, NEWNS, NEWPID, NEWNET, NEWIPC."""
MS_NOSUID, MS_NODEV = 2, 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

PADDING = 65534
INSIDE = 1000
"""The user and group id that a child has inside its namespace."""

FORBIDDEN = {
    # name: (number on x86_64, on aarch64)
    "socket": (41, 198),  # no network, and no service of this machine either
    "io_uring_setup": (425, 425),  # a ring opens sockets too
    "setpgid": (109, 154),  # leaving the process group that is killed with the run
    "setsid": (112, 157),
    "ptrace": (101, 117),  # looking into other processes
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "setreuid": (113, 145),  # becoming root again, to which no limit of processes applies
    "setresuid": (117, 147),
    "setuid": (105, 146),
    "memfd_create": (319, 279),  # memory that no limit counts
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "keyctl": (250, 219),  # the keys of the session
    "unshare": (272, 97),  # namespaces of its own, in which it would have capabilities
}
CLONE, CLONE3 = (56, 220), (435, 435)
"""CLONE is forbidden with flags of NAMESPACES. CLONE3, whose flags a filter cannot read, fails as unknown."""
SIGNALS = {
    # Forbidden where there is no namespace that hides the processes of others.
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of FORBIDDEN, and AUDIT_ARCH of linux/audit.h."""

libc = ctypes.CDLL(None, use_errno=True)


# ---- setup


def setup(job: Job) -> int:
    """Enter the namespaces and start the supervisor. Returns its exit status."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        # Limits of processes apply to the real user, and never to root; access to files, to the effective user.
        os.setgroups([])
        os.setresuid(PADDING, 0, 0)
        _prctl(PR_SET_DUMPABLE, 1)  # a change of user closed /proc/self
    with contextlib.suppress(OSError):
        _write("/proc/self/oom_score_adj", "1000")  # the first process to be killed when memory runs out
    if job["isolation"] == "namespaces":
        _checked(libc.unshare(NAMESPACES), "unshare: user, mount, pid, net and ipc namespaces")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{INSIDE} {uid} 1")
        _write("/proc/self/gid_map", f"{INSIDE} {gid} 1")
    _prctl(PR_SET_DUMPABLE, 0)  # closes /proc/<pid>/fd and mem, even for the same user
    supervisor_pid = os.fork()
    if supervisor_pid == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _exit_after(lambda: supervisor(job))
    _, status = os.waitpid(supervisor_pid, 0)
    return os.waitstatus_to_exitcode(status)


# ---- the supervisor


def supervisor(job: Job) -> int:
    """Write the result of each run to stdout: [{"ended", "code", "out", "passed"}, …], see `sandbox.ProgramRun`."""
    if job["isolation"] == "namespaces":
        _protect_files(job["folder"], job["limits"]["file_mb"])
    else:
        job["limits"]["processes"] += _threads_of_this_user()
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    deadline = time.monotonic() + job["limits"]["wall_s"]
    runs = [_run(job, given, deadline) for given in job["inputs"]]
    _write_all(1, json.dumps(runs).encode())
    return 0


def _protect_files(folder: str, megabytes: int) -> None:
    """Make all files read-only but an empty `folder` in memory, and hide other processes."""
    read_only = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    failed = libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, read_only, len(read_only))
    _checked(failed, "mount_setattr: read-only files (Linux 5.12 or newer)")
    _mount_memory(folder, f"size={megabytes}m,nr_inodes=4096,mode=700")
    _mount_memory("/proc", "size=0,nr_inodes=1,mode=555")


def _mount_memory(folder: str, options: str) -> None:
    flags = MS_NOSUID | MS_NODEV
    _checked(libc.mount(b"none", folder.encode(), b"tmpfs", flags, options.encode()), f"mount {folder}")


def _threads_of_this_user() -> int:
    """The user's number of threads: without a namespace, the limit of processes counts all of them."""
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
            status = dict(line.split(":", 1) for line in file if ":" in line)
            if int(status["Uid"].split()[0]) == os.getuid():
                count += int(status["Threads"])
    return count


def _run(job: Job, given: str, deadline: float) -> Job:
    """Start one child, and wait for its end."""
    output_read, output_write = os.pipe()
    verdict_read, verdict_write = os.pipe()
    stdin = os.memfd_create("stdin")
    _write_all(stdin, given.encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    secret = secrets.token_hex(16)
    pid = os.fork()
    if pid == 0:
        for end, fd in ((stdin, 0), (output_write, 1), (verdict_write, 3)):
            os.dup2(end, fd)
        _exit_after(lambda: child(job, secret))
    for end in (stdin, output_write, verdict_write):
        os.close(end)
    try:
        ended, out = _watch(pid, output_read, deadline, 1024 * job["limits"]["output_kb"])
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)  # in a namespace, its own children are now this process's
        verdict = _read_left(verdict_read, 1 << 16).decode(errors="replace")
    finally:
        os.close(output_read)
        os.close(verdict_read)
    passed = _passed(verdict, secret)
    return {"ended": ended, "code": code, "out": out.decode(errors="replace"), "passed": passed}


def _passed(verdict: str, secret: str) -> list[bool] | None:
    """The results of tests in a child's verdict; None if the program did not reach their end."""
    if not verdict.startswith(secret):
        return None
    return [digit == "1" for digit in verdict.removeprefix(secret)]


def _watch(pid: int, pipe: int, deadline: float, most: int) -> tuple[str, bytes]:
    """Read the child's output until it ends or a limit is reached, then kill its process group.

    Returns:
        (reason of the end, output). The child is not reaped yet, so that its pid is not reused.
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


# ---- the child


def child(job: Job, secret: str) -> int:
    """Run the program, then its tests. Returns the program's exit status."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.chdir(job["folder"])
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _limit(job["limits"])
    _drop_capabilities()
    _forbid(FORBIDDEN if job["isolation"] == "namespaces" else FORBIDDEN | SIGNALS)
    stdin, stdout, stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = stdin, stdout, stderr
    program, tests = job["program"], job["tests"]
    sys.argv, sys.modules["__main__"] = ["answer.py"], types.ModuleType("__main__")
    world = vars(sys.modules["__main__"])
    code = _execute(program, world)
    if tests is not None and code == 0:
        passed = ["01"[_execute(test, world) == 0] for test in tests]
        _write_all(3, (secret + "".join(passed)).encode())
    with contextlib.suppress(OSError, ValueError):
        stdout.flush()
    return code


def _execute(text: str, world: Job) -> int:
    """Run a program. Returns the exit status that it would have as a process."""
    try:
        exec(compile(text, "answer.py", "exec", dont_inherit=True), world)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        return 1
    return 0


def _limit(limits: Job) -> None:
    megabyte, cpu_s = 1 << 20, limits["cpu_s"]
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_AS, limits["memory_mb"] * megabyte, limits["memory_mb"] * megabyte),
        (resource.RLIMIT_FSIZE, limits["file_mb"] * megabyte, limits["file_mb"] * megabyte),
        (resource.RLIMIT_NPROC, limits["processes"], limits["processes"]),
        (resource.RLIMIT_NOFILE, 128, 128),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(kind, (soft, hard))


def _drop_capabilities() -> None:
    """Empty all three sets: capset(2) with _LINUX_CAPABILITY_VERSION_3."""
    header = struct.pack("Ii", 0x20080522, 0)
    _checked(libc.capset(header, bytes(24)), "capset")


def _forbid(calls: dict[str, tuple[int, int]]) -> None:
    """Install a seccomp filter: these calls fail with EPERM; calls of another architecture kill the process.

    A line is (operation, lines to skip if true, lines to skip if false, operand).
    """
    column, arch = MACHINES[os.uname().machine]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, refuse, unknown, allow = 0x80000000, 0x00050001, 0x00050026, 0x7FFF0000
    lines = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, 0)]
    lines += [(equal, 0, 4, CLONE[column]), (load, 0, 0, 16), (any_bit, 0, 1, NAMESPACES)]
    lines += [(give, 0, 0, refuse), (give, 0, 0, allow), (equal, 0, 1, CLONE3[column]), (give, 0, 0, unknown)]
    lines += [(at_least, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # x32, a second set of numbers
    for numbers in calls.values():
        lines += [(equal, 0, 1, numbers[column]), (give, 0, 0, refuse)]
    lines.append((give, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code))
    _prctl(PR_SET_SECCOMP, 2, program)


# ---- system calls


def _prctl(option: int, value: int, more: Any = 0) -> None:
    _checked(libc.prctl(option, value, more, 0, 0), f"prctl {option}")


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: {what}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _write_all(fd: int, raw: bytes) -> None:
    while raw:
        raw = raw[os.write(fd, raw) :]


def _exit_after(work: Callable[[], int]) -> NoReturn:
    """Run `work` and end a forked process, without unwinding its parent's frames."""
    status = 120
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status & 0xFF)


if __name__ == "__main__":
    try:
        sys.exit(setup(json.load(sys.stdin)))
    except OSError as error:
        sys.exit(f"{error}")
