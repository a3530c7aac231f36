"""A disk that is full, and one whose power fails: only what `fsync` has brought to it is there afterwards."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Inside, no file of this process grows beyond `size` bytes: writing fails at the same place as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


class Disk:
    """What of one folder would outlive a power failure, at worst.

    Contents are as they were when the file was last synced. Names may be those of now, or those of when the folder was
    last synced: a system is free to write them earlier than it must.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._contents: dict[int, bytes] = {}
        self._names: dict[str, int] = {}
        self._failures = itertools.count()
        self._kept: list[int] = []  # descriptors, so that no file gets the number of one that was deleted
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._synced)

    def after_failures(self) -> Iterator[Path]:
        """What is there after a power failure now: with the names of the last sync, and with those of now."""
        return map(self.after_failure, (False, True))

    def after_failure(self, names_of_now: bool) -> Path:
        """Write what is there after a power failure now into a folder, and return it."""
        folder = self.folder.with_name(f"after-failure-{next(self._failures)}")
        folder.mkdir()
        for name, number in (self._now() if names_of_now else self._names).items():
            (folder / name).write_bytes(self._contents.get(number, b""))
        return folder

    def close(self) -> None:
        for descriptor in self._kept:
            os.close(descriptor)

    def _synced(self, descriptor: int) -> None:
        self._fsync(descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISDIR(status.st_mode):
            self._kept.append(os.dup(descriptor))
            (name,) = (name for name, number in self._now().items() if number == status.st_ino)
            self._contents[status.st_ino] = (self.folder / name).read_bytes()
        elif os.path.samestat(status, self.folder.stat()):
            self._names = self._now()

    def _now(self) -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in self.folder.iterdir()}
