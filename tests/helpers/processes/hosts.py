"""Hosts of one network, all on this machine: each has addresses, ports, a name and an /etc/hosts of its own (namespaces
of Linux). They share processors, memory and files, as if every folder were mounted on all of them.

    host-1  10.77.0.1  fd77::1 ──┐
    host-2  10.77.0.2  fd77::2 ──┼── a bridge, in a namespace of its own        nothing leads out of this network
    …                            ┘
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import missing
import pytest
from namespaces import VARIABLE, enter
from processes import DEADLINE_S, Process, started

from asyncrl.system.signals import die_with_parent

CARD = "eth0"
SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Host:
    """holder: the process that keeps its namespaces · name, address, address6: as others reach it"""

    def __init__(self, number: int, holder: subprocess.Popen[str]) -> None:
        self._number, self._holder = number, holder
        self.name, self.address, self.address6 = f"host-{number}", f"10.77.0.{number}", f"fd77::{number}"

    @contextmanager
    def started(self, *words: str, env: Mapping[str, str] | None = None) -> Iterator[Process]:
        """As `processes.started`, on this host."""
        with started(*words, env={**(env or {}), VARIABLE: str(self._holder.pid)}) as process:
            yield process

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

    def run(self, *words: str) -> str:
        """The output of a command, which must succeed, as root of this host."""
        return _run(self._holder.pid, *words)


class Network:
    """Hosts that reach each other, and nothing else. Skips the test where this machine allows none."""

    def __init__(self, count: int, folder: Path) -> None:
        if shutil.which("ip", path=SBIN) is None:
            pytest.skip(missing.IPROUTE)
        self._holders: list[subprocess.Popen[str]] = []
        try:
            self._switch = self._hold("unshare", "--user", "--map-root-user", "--net")
        except OSError as error:
            pytest.skip(f"{missing.NAMESPACES}: {error}")
        _run(self._switch.pid, "ip", "link", "add", "switch", "type", "bridge")
        _run(self._switch.pid, "ip", "link", "set", "switch", "up")
        self.hosts = [self._add(number, count, folder) for number in range(1, count + 1)]

    def close(self) -> None:
        for holder in reversed(self._holders):
            assert holder.stdin is not None
            holder.stdin.close()
            holder.wait(DEADLINE_S)

    def _add(self, number: int, count: int, folder: Path) -> Host:
        holder = self._hold("unshare", "--net", "--uts", "--mount", inside=self._switch.pid)
        host, cable = Host(number, holder), f"cable-{number}"
        names = folder / f"hosts-{number}"
        # As Debian has it: a host's own name leads to loopback.
        others = [f"10.77.0.{other} host-{other}\n" for other in range(1, count + 1) if other != number]
        names.write_text("".join(["127.0.0.1 localhost\n", f"127.0.1.1 {host.name}\n", *others]))
        host.run("mount", "--bind", str(names), "/etc/hosts")
        host.run("hostname", host.name)
        host.run("ip", "link", "set", "lo", "up")
        card = ("peer", "name", CARD, "netns", str(holder.pid))
        _run(self._switch.pid, "ip", "link", "add", cable, "type", "veth", *card)
        _run(self._switch.pid, "ip", "link", "set", cable, "master", "switch", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", CARD)
        host.reconnect()
        return host

    def _hold(self, *unshare: str, inside: int | None = None) -> subprocess.Popen[str]:
        """A process in new namespaces, which ends with this one at the latest. OSError if there can be none."""

        def begin() -> None:
            die_with_parent()
            if inside is not None:
                enter(inside)

        holder = subprocess.Popen(
            [*unshare, "sh", "-c", "echo there; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=begin,
        )
        assert holder.stdout is not None
        if (line := holder.stdout.readline()) != "there\n":
            raise OSError(line)
        self._holders.append(holder)
        return holder


def _run(pid: int, *words: str) -> str:
    done = subprocess.run(
        words,
        env={**os.environ, "PATH": SBIN},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        preexec_fn=lambda: enter(pid),
    )
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout
