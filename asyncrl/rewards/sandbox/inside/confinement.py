"""Limits, forbidden system calls and the loss of all rights, for processes of the sandbox.

Sources: capabilities(7), seccomp(2), getrlimit(2), prctl(2), pid_namespaces(7).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from typing import Any

from .system import (
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    PR_SET_SECCOMP,
    checked,
    libc,
    prctl,
)

NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""

INSIDE = 1000
"""User and group id of all processes inside; outside it is nobody's, or that of an ordinary user of asyncrl."""

FORBIDDEN = {
    # name: (number on x86_64, on aarch64)
    "socket": (41, 198),  # no network, and no service of this machine either
    "io_uring_setup": (425, 425),  # a ring opens sockets too
    "setpgid": (109, 154),  # leaving the process group that is killed with the run
    "setsid": (112, 157),
    "ptrace": (101, 117),  # looking into other processes
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),  # taking files that others have open
    "kcmp": (312, 272),
    "perf_event_open": (298, 241),
    "setreuid": (113, 145),  # other ids
    "setresuid": (117, 147),
    "setuid": (105, 146),
    "memfd_create": (319, 279),  # memory that no limit counts
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "add_key": (248, 217),  # the keys of the session
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),  # namespaces, in which it would have capabilities
    "setns": (308, 268),
    "mount": (165, 40),  # other files
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "syslog": (103, 116),  # the kernel's messages, where everybody may read them
    "io_setup": (206, 0),  # of these the whole machine has one number
    "fanotify_init": (300, 262),
    "bpf": (321, 280),  # parts of the kernel that few programs need and many exploits did
    "userfaultfd": (323, 282),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
}
PRLIMIT = (302, 261)
"""Allowed for the calling process alone: the limits of process 1 are those of somebody else."""
CLONE, CLONE3 = (56, 220), (435, 435)
"""CLONE is forbidden with flags of NAMESPACES. CLONE3, whose flags a filter cannot read, fails as unknown."""
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of FORBIDDEN, and AUDIT_ARCH of linux/audit.h."""


def become_supervisor() -> None:
    """Make process 1 of a namespace one that no process inside can harm: no rights to lose, no signals to receive.

    The kernel drops every signal to process 1 for which it has no handler, SIGKILL too, if it comes from inside.
    """
    if os.getpid() != 1:
        raise OSError(f"the supervisor is process {os.getpid()}, not process 1 of its namespace")
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        signal.signal(number, signal.SIG_DFL)  # Python handles SIGINT, and ignores the two that are left out
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(INSIDE, INSIDE, INSIDE)
        os.setresuid(INSIDE, INSIDE, INSIDE)
    drop_capabilities()
    _check_devices()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)  # closes its memory and its files to other processes of the same user
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of ids forgets it


def _check_devices() -> None:
    """Raises OSError if programs could change the modes of devices: bubblewrap does not mount devices read-only."""
    for name in os.listdir("/dev"):
        path = f"/dev/{name}"
        if os.stat(path).st_uid == os.getuid() and not os.statvfs(path).f_flag & os.ST_RDONLY:
            raise OSError(f"{path} belongs to the user of asyncrl, so that programs could change its mode")


def drop_capabilities() -> None:
    """Empty all three sets: capset(2) with _LINUX_CAPABILITY_VERSION_3."""
    checked(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")


def limit(limits: dict[str, Any], cpu_s: int) -> None:
    megabyte = 1 << 20
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_AS, limits["memory_mb"] * megabyte, limits["memory_mb"] * megabyte),
        (resource.RLIMIT_FSIZE, limits["file_mb"] * megabyte, limits["file_mb"] * megabyte),
        (resource.RLIMIT_NPROC, limits["processes"], limits["processes"]),
        (resource.RLIMIT_NOFILE, 128, 128),
        (resource.RLIMIT_CORE, 1, 1),  # no dump into a file, nor, as with 0, to a program of the system
    ):
        resource.setrlimit(kind, (soft, hard))


def forbid_calls() -> None:
    """Install a seccomp filter: forbidden calls fail with EPERM; calls of another architecture kill the process.

    A line is (operation, lines to skip if true, lines to skip if false, operand).
    """
    column, arch = MACHINES[os.uname().machine]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, refuse, unknown, allow = 0x80000000, 0x00050001, 0x00050026, 0x7FFF0000
    lines = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, 0)]
    lines += [(equal, 0, 4, CLONE[column]), (load, 0, 0, 16), (any_bit, 0, 1, NAMESPACES)]
    lines += [(give, 0, 0, refuse), (give, 0, 0, allow), (equal, 0, 1, CLONE3[column]), (give, 0, 0, unknown)]
    lines += [(equal, 0, 4, PRLIMIT[column]), (load, 0, 0, 16), (equal, 1, 0, 0), (give, 0, 0, refuse)]
    lines += [(give, 0, 0, allow)]
    lines += [(at_least, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # x32, a second set of numbers
    for numbers in FORBIDDEN.values():
        lines += [(equal, 0, 1, numbers[column]), (give, 0, 0, refuse)]
    lines.append((give, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, 2, program)
