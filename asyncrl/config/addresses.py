"""Addresses of the configuration: what they may be, and who can reach them."""

from __future__ import annotations

from ipaddress import ip_address

from asyncrl.config.rules import Rule

EVERY_ADDRESS = ("", "*", "0.0.0.0", "::")
"""Hosts that stand for all addresses of a machine."""


def stays_here(address: str) -> bool:
    """Whether only processes of this machine can reach a ZeroMQ address.

    >>> [stays_here(a) for a in ("tcp://127.0.0.1:*", "tcp://[::1]:5", "ipc:///tmp/q", "tcp://*:5", "tcp://node:5")]
    [True, True, True, False, False]
    """
    scheme, _, rest = address.partition("://")
    return scheme in ("ipc", "inproc") or is_loopback(rest.rpartition(":")[0].strip("[]"))


def has_port(address: str) -> bool:
    """Whether a ZeroMQ address has a host and a port, if it is of TCP. ZeroMQ takes a port above 65535 as another.

    >>> [has_port(a) for a in ("tcp://[::1]:*", "tcp://node:65535", "ipc:///tmp/q", "tcp://::1:5", "tcp://node:65536")]
    [True, True, True, False, False]
    """
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    whole = host.startswith("[") or ":" not in host
    known = port == "*" or (port.isdecimal() and int(port) < 1 << 16)
    return scheme != "tcp" or (host != "" and whole and known)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach a host, by its name or address alone.

    >>> [is_loopback(host) for host in ("127.0.0.2", "::1", "localhost", "0.0.0.0", "127.org", "node", "")]
    [True, True, True, False, False, False, False]
    """
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def ports_of(text: str) -> range:
    """Empty for what is no range.

    >>> ports_of("20000-20999"), ports_of("80-79"), ports_of("1-65536"), ports_of("x-2")
    (range(20000, 21000), range(0, 0), range(0, 0), range(0, 0))
    """
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 1 << 16):
        return range(0)
    return range(int(first), int(last) + 1)


def listening_rule(key_name: str, host_is_safe: bool, keys: str | None) -> Rule:
    """A socket that other machines can reach needs the run's keys."""
    return Rule(
        keys is not None or host_is_safe,
        key_name,
        "can be reached from other machines, and queue.keys is not set",
        "make keys with `asyncrl keys DIR`, copy DIR without server.key to the machines of the run that have no "
        "queue, and set queue.keys=DIR",
    )
