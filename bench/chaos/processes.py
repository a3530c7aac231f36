"""Processes of a run among the descendants of its launcher: found, killed, stopped, or without room on the disk."""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Iterable
from contextlib import suppress

import psutil

PARTIES = ("generator", "queue", "learner")


def processes(launcher: int, party: str) -> list[psutil.Process]:
    """Those of `asyncrl PARTY …` that live; several for generators and learner ranks."""
    return [one for one in family(launcher)[1:] if _is(one, party)]


def family(launcher: int) -> list[psutil.Process]:
    """The launcher, and all its descendants."""
    try:
        parent = psutil.Process(launcher)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(launcher: int, party: str, rng: random.Random) -> bool:
    """SIGKILL to one process of this party. False if none is there."""
    return send(launcher, party, signal.SIGKILL, rng) is not None


def send(launcher: int, party: str, number: signal.Signals, rng: random.Random) -> psutil.Process | None:
    """The signal, to one process of this party. Returns that process, or None if none is there."""
    found = processes(launcher, party)
    if not found:
        return None
    chosen = rng.choice(found)
    try:
        chosen.send_signal(number)
    except psutil.NoSuchProcess:
        return None
    return chosen


def limit_files(of: Iterable[psutil.Process], size: int = resource.RLIM_INFINITY) -> None:
    """No file of these processes grows beyond `size` bytes from now on: writes fail as on a full disk. Needs no rights.

    Python ignores the signal that comes with it. Children that start meanwhile have the same limit.
    """
    for one in of:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            _, hard = resource.prlimit(one.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (size, hard))


def _is(process: psutil.Process, party: str) -> bool:
    try:
        words = process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
    return any(words[at : at + 2] == ["asyncrl", party] for at in range(len(words)))
