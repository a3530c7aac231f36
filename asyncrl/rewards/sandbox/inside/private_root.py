"""Namespaces and a private root, made without bubblewrap: then this process's child is process 1 of `supervisor.py`.

    this process ── unshare ── (root: a helper maps two ids) ── fork ──▸ process 1: a new root, no rights, supervisor
      waits ◂────────────────────────── status ─────────────────────────┘

Sources: namespaces(7), user_namespaces(7), mount_setattr(2), pivot_root(2).
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from typing import Any

from . import supervisor
from .confinement import INSIDE, NAMESPACES
from .system import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, checked, exit_after, libc, prctl, write_text

NOBODY = 65534
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 0x1000, 0x4000, 1 << 18, 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
MOUNT_SETATTR, PIVOT_ROOT, AT_FDCWD, AT_RECURSIVE = 442, {"x86_64": 155, "aarch64": 41}, -100, 0x8000
CLONE_NEWUSER = 0x10000000


def main(root: dict[str, Any]) -> int:
    """root: {"binds": [[from, to], …], "devices": […], "own": folder, "inside": folder, "file_mb", "packages": […]}.

    Returns the exit status.
    """
    enter_namespaces(NAMESPACES)
    pid = os.fork()
    if pid == 0:
        exit_after(lambda: _process_1(root))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def enter_namespaces(flags: int) -> None:
    """Root gets two ids inside: its own for the mounts, and nobody's as INSIDE. Another user gets its own as INSIDE."""
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0:
        checked(libc.unshare(flags), "unshare: user, mount, pid, net, ipc and uts namespaces")
        write_text("/proc/self/setgroups", "deny")
        write_text("/proc/self/uid_map", f"{INSIDE} {uid} 1")
        write_text("/proc/self/gid_map", f"{INSIDE} {gid} 1")
        return
    begin, begun = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(begun)
        exit_after(lambda: _map_ids(os.getppid(), begin))
    os.close(begin)
    checked(libc.unshare(flags), "unshare: user, mount, pid, net, ipc and uts namespaces")
    os.write(begun, b"!")
    os.close(begun)
    if os.waitpid(helper, 0)[1] != 0:
        raise OSError(
            "root could not map nobody's id (user_namespaces(7): it needs CAP_SETUID and CAP_SETGID)"
        )


def _map_ids(pid: int, begin: int) -> int:
    if os.read(begin, 1):
        for kind in ("uid", "gid"):
            write_text(f"/proc/{pid}/{kind}_map", f"0 0 1\n{INSIDE} {NOBODY} 1")
    return 0


def hold_user_namespace() -> int:
    """For bubblewrap, started by root: make a namespace of two ids, write a byte, and wait for the end of stdin."""
    enter_namespaces(CLONE_NEWUSER)
    prctl(PR_SET_DUMPABLE, 1)  # its parent opens /proc/<pid>/ns/user
    os.write(1, b"!")
    os.read(0, 1)
    return 0


def _process_1(root: dict[str, Any]) -> int:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.umask(0o022)
    _enter_root(root)
    sys.modules[__package__].__path__ = [root["inside"]]  # where this package lies now
    return supervisor.main(root["packages"])


def _enter_root(root: dict[str, Any]) -> None:
    """Build the new root on memory, make it read-only, and forget the old one."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE, "")
    _mount("none", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for folder in ("/tmp/old", "/tmp/new"):
        os.mkdir(folder)
    _pivot("/tmp", "/tmp/old")
    os.chdir("/")
    _mount("none", "/new", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for source, target in root["binds"]:
        _bind(f"/old{source}", f"/new{target}", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
    for device in root["devices"]:
        # Read-only: its bytes can be written, its mode cannot be changed.
        _bind(f"/old{device}", f"/new{device}", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)
    os.makedirs("/new/proc", mode=0o755)
    own = f"/new{root['own']}"
    os.makedirs(own)
    _mount("none", own, "tmpfs", MS_NOSUID | MS_NODEV, f"size={root['file_mb']}m,nr_inodes=4096,mode=777")
    os.chdir("/new")
    _pivot(".", ".")
    checked(libc.umount2(b".", MNT_DETACH), "umount the old root")
    os.chdir("/")
    _attributes("/", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0)


def _bind(source: str, target: str, attributes: int) -> None:
    """A file or folder of the old root, at the same kind of place in the new one."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT, 0o644))
    _mount(source, target, None, MS_BIND | MS_REC, "")
    _attributes(target, attributes, AT_RECURSIVE)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str) -> None:
    done = libc.mount(source.encode(), target.encode(), kind and kind.encode(), flags, options.encode())
    checked(done, f"mount {target}")


def _attributes(target: str, attributes: int, flags: int) -> None:
    raw = struct.pack("QQQQ", attributes, 0, 0, 0)
    done = libc.syscall(MOUNT_SETATTR, AT_FDCWD, target.encode(), flags, raw, len(raw))
    checked(done, f"mount_setattr {target} (Linux 5.12 or newer)")


def _pivot(new: str, old: str) -> None:
    number = PIVOT_ROOT[os.uname().machine]
    checked(libc.syscall(number, new.encode(), old.encode()), f"pivot_root {new}")
