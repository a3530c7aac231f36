"""Hosts of a network (bench/network/hosts.py) for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import missing
import pytest
from forked import HOST
from processes import Process, started

from bench.network.hosts import Host, Network, NoNamespacesError, has_commands


def network_or_skip(count: int, folder: Path) -> Network:
    """Skips the test where this machine allows none."""
    if not has_commands():
        pytest.skip(missing.IPROUTE)
    try:
        return Network(count, folder)
    except NoNamespacesError as error:
        pytest.skip(f"{missing.NAMESPACES}: {error}")


@contextmanager
def started_on(host: Host, *words: str, env: Mapping[str, str] | None = None) -> Iterator[Process]:
    """As `processes.started`, on this host."""
    with started(*words, env={**(env or {}), HOST: str(host.pid)}) as process:
        yield process
