"""Moves a process of the tests to a host of `hosts.Network`."""

from __future__ import annotations

import ctypes
import os

from asyncrl.system.signals import die_with_parent

VARIABLE = "ASYNCRL_TESTS_HOST"
"""Set to the id of a process, a forked process of the tests moves to its host before it runs anything."""

KINDS = ("user", "net", "uts", "mnt")
"""Kinds of namespaces, in the order in which a process enters them."""


def enter(pid: int) -> None:
    """Move this process, which has one thread, to the namespaces of another one."""
    libc, folder = ctypes.CDLL(None, use_errno=True), os.getcwd()
    opened = []
    for kind in KINDS:
        there = f"/proc/{pid}/ns/{kind}"
        if not os.path.samefile(there, f"/proc/self/ns/{kind}"):
            opened.append(os.open(there, os.O_RDONLY | os.O_CLOEXEC))
    for descriptor in opened:
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"process {pid}'s namespaces cannot be entered")
        os.close(descriptor)
    os.chdir(folder)  # the new mounts begin at their root
    die_with_parent()  # the kernel forgets it where rights change
