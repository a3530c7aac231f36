"""Hosts of one network, all on this machine: each has addresses, ports, a name and an /etc/hosts of its own (namespaces
of Linux). They share processors, memory and files, as if every folder were mounted on all of them.

    host-1  10.77.0.1  fd77::1 ──┐
    host-2  10.77.0.2  fd77::2 ──┼── a bridge, in a namespace of its own        nothing leads out of this network
    …                            ┘

They need Linux that allows user namespaces, and the commands of iproute2 and util-linux.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from asyncrl.system.signals import die_with_parent

CARD = "eth0"
SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
KINDS = ("user", "net", "uts", "mnt")
"""Kinds of namespaces, in the order in which a process enters them."""

COMMAND_S = 60.0
QUEUED_S = 0.05
"""A packet that would wait for longer at the card is dropped, and sent again."""

BURST_S = 0.004


class NoNamespacesError(Exception):
    """This machine allows no new namespaces."""


class Host:
    """pid: of the process that keeps its namespaces · name, address, address6: as others reach it"""

    def __init__(self, number: int, pid: int) -> None:
        self.pid = pid
        self.name, self.address, self.address6 = f"host-{number}", f"10.77.0.{number}", f"fd77::{number}"

    def run(self, *words: str) -> str:
        """The output of a command, which must succeed, as root of this host."""
        return _run(self.pid, *words)

    def moving_there(self) -> Callable[[], None]:
        """A function to run between fork and exec of a process: it is on this host then, and ends with its parent."""
        return lambda: enter(self.pid)

    def cut_off(self) -> None:
        """No packet comes or goes, and nobody is notified of it."""
        self.run("ip", "link", "set", CARD, "down")

    def reconnect(self) -> None:
        self.run("ip", "link", "set", CARD, "up")
        self.run("ip", "address", "replace", f"{self.address6}/64", "dev", CARD, "nodad")

    @contextmanager
    def without_ipv4(self) -> Iterator[None]:
        """Inside, it has an address of IPv6 alone."""
        self.run("ip", "address", "delete", f"{self.address}/24", "dev", CARD)
        try:
            yield
        finally:
            self.run("ip", "address", "add", f"{self.address}/24", "dev", CARD)

    def listens(self) -> set[tuple[str, int]]:
        """(address, port) of all sockets that wait for calls here, those on loopback aside."""
        places = [line.split()[3].rpartition(":") for line in self.run("ss", "-Hltn").splitlines()]
        heard = {(address.partition("%")[0].strip("[]"), int(port)) for address, _, port in places}
        return {(address, port) for address, port in heard if address not in ("127.0.0.1", "::1")}


class Network:
    """Hosts that reach each other, and nothing else. NoNamespacesError where this machine allows none.

    folder: for their files
    """

    def __init__(self, count: int, folder: Path) -> None:
        self._holders: list[subprocess.Popen[str]] = []
        try:
            self._switch = self._hold("unshare", "--user", "--map-root-user", "--net")
            _run(self._switch, "ip", "link", "add", "switch", "type", "bridge")
            _run(self._switch, "ip", "link", "set", "switch", "up")
            self.hosts = [self._add(number, count, folder) for number in range(1, count + 1)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for holder in reversed(self._holders):
            assert holder.stdin is not None
            holder.stdin.close()
            holder.wait(COMMAND_S)

    def limit(self, bytes_per_s: float) -> None:
        """Let the card of each host send and receive no faster."""
        shape = ("rate", f"{8 * bytes_per_s:.0f}bit", "burst", f"{BURST_S * bytes_per_s:.0f}b")
        tbf = ("root", "tbf", *shape, "latency", f"{QUEUED_S * 1e3:.0f}ms")
        for number, host in enumerate(self.hosts, 1):
            host.run("tc", "qdisc", "replace", "dev", CARD, *tbf)
            _run(self._switch, "tc", "qdisc", "replace", "dev", _cable(number), *tbf)

    def _add(self, number: int, count: int, folder: Path) -> Host:
        host = Host(number, self._hold("unshare", "--net", "--uts", "--mount", inside=self._switch))
        names = folder / f"hosts-{number}"
        # As Debian has it: a host's own name leads to loopback.
        others = [f"10.77.0.{other} host-{other}\n" for other in range(1, count + 1) if other != number]
        names.write_text("".join(["127.0.0.1 localhost\n", f"127.0.1.1 {host.name}\n", *others]))
        host.run("mount", "--bind", str(names), "/etc/hosts")
        host.run("hostname", host.name)
        host.run("ip", "link", "set", "lo", "up")
        card = ("peer", "name", CARD, "netns", str(host.pid))
        _run(self._switch, "ip", "link", "add", _cable(number), "type", "veth", *card)
        _run(self._switch, "ip", "link", "set", _cable(number), "master", "switch", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", CARD)
        host.reconnect()
        return host

    def _hold(self, *unshare: str, inside: int | None = None) -> int:
        """The id of a process in new namespaces, which ends with this one at the latest."""
        holder = subprocess.Popen(
            [*unshare, "sh", "-c", "echo there; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=die_with_parent if inside is None else lambda: enter(inside),
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        if (line := holder.stdout.readline()) != "there\n":
            raise NoNamespacesError(line.strip())
        return holder.pid


def _cable(number: int) -> str:
    """The switch's end of the way to a host."""
    return f"cable-{number}"


def has_commands() -> bool:
    return all(shutil.which(name, path=SBIN) for name in ("ip", "ss", "tc", "unshare"))


def enter(pid: int) -> None:
    """Move this process, which has one thread, to the namespaces of another one. It ends with its parent."""
    libc, folder = ctypes.CDLL(None, use_errno=True), os.getcwd()
    opened = []
    for kind in KINDS:
        there = f"/proc/{pid}/ns/{kind}"
        if not os.path.samefile(there, f"/proc/self/ns/{kind}"):
            opened.append(os.open(there, os.O_RDONLY | os.O_CLOEXEC))
    for descriptor in opened:
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"the namespaces of process {pid} cannot be entered")
        os.close(descriptor)
    os.chdir(folder)  # the new mounts begin at their root
    die_with_parent()  # the kernel forgets it where rights change


def _run(pid: int, *words: str) -> str:
    done = subprocess.run(
        words,
        env={**os.environ, "PATH": SBIN},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        preexec_fn=lambda: enter(pid),
    )
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout
