"""Finding a process of a run among the descendants of its launcher, and killing it where it stands."""

from __future__ import annotations

import random

import psutil

PARTIES = ("generator", "queue", "learner")


def processes(launcher: int, party: str) -> list[psutil.Process]:
    """Those of `asyncrl PARTY …` that live; several for generators and learner ranks."""
    try:
        children = psutil.Process(launcher).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if _is(child, party)]


def kill(launcher: int, party: str, rng: random.Random) -> bool:
    """SIGKILL to one process of this party. False if none is there."""
    found = processes(launcher, party)
    if not found:
        return False
    try:
        rng.choice(found).kill()
    except psutil.NoSuchProcess:
        return False
    return True


def _is(process: psutil.Process, party: str) -> bool:
    try:
        words = process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
    return any(words[at : at + 2] == ["asyncrl", party] for at in range(len(words)))
