"""Inside the sandbox: shuts this process in and runs one program. Started by `sandbox.py` as a script of its own.

    stdin: {limits, isolation, folder, program, tests, inputs}        stdout: [what came of each run, …]
        ▾                                                                  ▴
    door ─── fork ──▸ warden ──────────────────────────────────────────────┘ ─── fork per run ──▸ prisoner
      into namespaces,  files read-only but a folder in memory;                    limits, no capabilities,
      then only waits   counts the time, takes the output, kills                   forbidden calls; the program

Nothing of what the prisoner runs is ever loaded in the warden, and no pipe of the warden reaches the prisoner.
The standard library alone: this file is a program, not a part of the package.

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

NOBODY = 65534
INSIDE = 1000
"""Who a prisoner takes itself for."""

FORBIDDEN = {
    # name: (number on x86_64, on aarch64)
    "socket": (41, 198),  # no network, and no service of this machine either
    "io_uring_setup": (425, 425),  # a ring opens sockets too
    "setpgid": (109, 154),  # leaving the process group, by which a run is killed
    "setsid": (112, 157),
    "ptrace": (101, 117),  # looking into other processes
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "setreuid": (113, 145),  # becoming root again, whom no limit of processes holds
    "setresuid": (117, 147),
    "setuid": (105, 146),
    "memfd_create": (319, 279),  # memory that no limit counts
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "keyctl": (250, 219),  # the keys of the session
    "unshare": (272, 97),  # namespaces of its own, in which it would have capabilities
}
CLONE, CLONE3 = (56, 220), (435, 435)
"""With flags of NAMESPACES the first is forbidden; the second, whose flags a filter cannot see, is as if not there."""
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


# ---- the door: before anything can be seen of the program


def door(job: Job) -> int:
    """Exit status of the warden."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        # Limits of processes go by the real user, and root has none; files go by the effective one.
        os.setgroups([])
        os.setresuid(NOBODY, 0, 0)
        _prctl(PR_SET_DUMPABLE, 1)  # a change of user closed /proc/self
    with contextlib.suppress(OSError):
        _write("/proc/self/oom_score_adj", "1000")  # if memory ends, this ends first
    if job["isolation"] == "namespaces":
        _checked(libc.unshare(NAMESPACES), "unshare: user, mount, pid, net and ipc namespaces")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{INSIDE} {uid} 1")
        _write("/proc/self/gid_map", f"{INSIDE} {gid} 1")
    _prctl(PR_SET_DUMPABLE, 0)  # /proc/<pid>/fd and mem are shut, even for the same user
    warden_pid = os.fork()
    if warden_pid == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _exit_after(lambda: warden(job))
    _, status = os.waitpid(warden_pid, 0)
    return os.waitstatus_to_exitcode(status)


# ---- the warden


def warden(job: Job) -> int:
    """Writes what came of each run to stdout: [{"ended", "code", "out", "passed"}, …], see `sandbox.ProgramRun`."""
    if job["isolation"] == "namespaces":
        _shut_files(job["folder"], job["limits"]["file_mb"])
    else:
        job["limits"]["processes"] += _threads_of_this_user()
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    deadline = time.monotonic() + job["limits"]["wall_s"]
    runs = [_run(job, given, deadline) for given in job["inputs"]]
    _write_all(1, json.dumps(runs).encode())
    return 0


def _shut_files(folder: str, megabytes: int) -> None:
    """Everything is read-only but `folder`, which is empty and in memory; other processes cannot be seen."""
    read_only = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    failed = libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, read_only, len(read_only))
    _checked(failed, "mount_setattr: read-only files (Linux 5.12 or newer)")
    _mount_memory(folder, f"size={megabytes}m,nr_inodes=4096,mode=700")
    _mount_memory("/proc", "size=0,nr_inodes=1,mode=555")


def _mount_memory(folder: str, options: str) -> None:
    flags = MS_NOSUID | MS_NODEV
    _checked(libc.mount(b"none", folder.encode(), b"tmpfs", flags, options.encode()), f"mount {folder}")


def _threads_of_this_user() -> int:
    """Without a namespace the limit of processes counts all that the user has, by its real id."""
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
            status = dict(line.split(":", 1) for line in file if ":" in line)
            if int(status["Uid"].split()[0]) == os.getuid():
                count += int(status["Threads"])
    return count


def _run(job: Job, given: str, deadline: float) -> Job:
    """One prisoner from birth to death."""
    said, saying = os.pipe()
    told, telling = os.pipe()
    stdin = os.memfd_create("stdin")
    _write_all(stdin, given.encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    secret = secrets.token_hex(16)
    pid = os.fork()
    if pid == 0:
        for end, fd in ((stdin, 0), (saying, 1), (telling, 3)):
            os.dup2(end, fd)
        _exit_after(lambda: prisoner(job, secret))
    for end in (stdin, saying, telling):
        os.close(end)
    try:
        ended, out = _watch(pid, said, deadline, 1024 * job["limits"]["output_kb"])
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)  # what it started has become the warden's in a namespace
        verdict = _read_left(told, 1 << 16).decode(errors="replace")
    finally:
        os.close(said)
        os.close(told)
    passed = _passed(verdict, secret)
    return {"ended": ended, "code": code, "out": out.decode(errors="replace"), "passed": passed}


def _passed(verdict: str, secret: str) -> list[bool] | None:
    """What the prisoner says of its tests, if it got so far."""
    if not verdict.startswith(secret):
        return None
    return [letter == "1" for letter in verdict.removeprefix(secret)]


def _watch(pid: int, said: int, deadline: float, most: int) -> tuple[str, bytes]:
    """Until the prisoner is dead, with all that it started. It is not waited for yet, so that nobody gets its pid."""
    out, ended, dead = b"", "", os.pidfd_open(pid)
    poll = select.poll()
    poll.register(said, select.POLLIN)
    poll.register(dead, select.POLLIN)
    while not ended:
        ready = dict(poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))))
        if not ready:
            ended = "time"
        if said in ready:
            piece = os.read(said, 1 << 16)
            out += piece
            if not piece:
                poll.unregister(said)
            if len(out) > most:
                ended = "output"
        elif dead in ready:
            ended = "exit"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)  # dead already or killed before it had a group of its own
    os.close(dead)
    return ended, (out + _read_left(said, most))[:most]


def _read_left(pipe: int, most: int) -> bytes:
    """What lies in a pipe, without waiting for more."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, most)
    except BlockingIOError:
        return b""


# ---- the prisoner


def prisoner(job: Job, secret: str) -> int:
    """Runs the program, then its tests. 0 if it ended as programs should."""
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
    """Exit status, as of a program of its own."""
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
    """All three sets empty: capset(2) with _LINUX_CAPABILITY_VERSION_3."""
    header = struct.pack("Ii", 0x20080522, 0)
    _checked(libc.capset(header, bytes(24)), "capset")


def _forbid(calls: dict[str, tuple[int, int]]) -> None:
    """A seccomp filter: these calls fail with EPERM, calls of another architecture kill.

    A line is (what, lines to skip if so, lines to skip if not, number).
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


# ---- small tools


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
    """The end of a forked process: nothing of its parent's is unwound."""
    status = 120
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status & 0xFF)


if __name__ == "__main__":
    try:
        sys.exit(door(json.load(sys.stdin)))
    except OSError as error:
        sys.exit(f"{error}")
