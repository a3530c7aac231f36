"""The folder that judges of a host share: replies by the hash of their request, and what was spent.

folder/replies/<hash>     one reply; its time is that of its last use
folder/spent.json         {"calls": 12, "tokens": 8400}, changed under a lock by one write of as many bytes
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from asyncrl.system.disk import replace_text

KEPT = 0.9
"""The share of the limit that is left once old replies have gone."""

LENGTH = 80
"""Bytes of spent.json: a process that dies at any time leaves the old numbers or the new ones."""

UNCOUNTED = 0.05
"""The share of the limit that one process writes before it counts the folder again."""

log = logging.getLogger(__name__)


class ReplyCache:
    """Replies by name, at most `limit` bytes, for any number of processes and threads."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder / "replies", limit
        self._written = limit  # so that the first reply counts the folder

    def get(self, name: str) -> str | None:
        try:
            os.utime(self._folder / name)
            return (self._folder / name).read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    def put(self, name: str, reply: str) -> None:
        """Keep a reply. If the folder cannot be written to, the request is made again another time, and no reward
        fails."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_text(self._folder / name, reply)
            self._written += len(reply.encode())
            if self._written > UNCOUNTED * self._limit:
                self._written = 0
                self._remove_old()
        except OSError as error:
            log.warning("a reply of the judge is not kept: %s", error)

    def _remove_old(self) -> None:
        files = sorted(
            (entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in os.scandir(self._folder)
        )
        excess = sum(size for _, size, _ in files) - self._limit
        if excess > 0:
            excess += int((1 - KEPT) * self._limit)
        for _, size, path in files:
            if excess <= 0:
                return
            Path(path).unlink(missing_ok=True)
            excess -= size


class Budget:
    """Counts calls and tokens in the folder; in this process alone if there is none."""

    def __init__(self, folder: Path | None) -> None:
        self._file = folder and folder / "spent.json"
        self._spent = {"calls": 0, "tokens": 0}

    def add(self, **more: int) -> Mapping[str, int]:
        """Count more calls or tokens. Returns what is spent now."""
        if self._file is None:
            return self._summed(self._spent, more)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            spent = self._summed(json.loads(file.read() or b"{}"), more)
            os.pwrite(file.fileno(), json.dumps(spent).encode().ljust(LENGTH), 0)
        return spent

    def _summed(self, before: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
        self._spent = {name: before.get(name, 0) + more.get(name, 0) for name in self._spent}
        return self._spent
