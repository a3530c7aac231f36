"""A power failure, for tests of what `fsync` is for: only what has reached the disk is there afterwards."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest


class Disk:
    """What of one folder would outlive a power failure, at worst.

    Contents are as they were when the file was last synced. Names may be those of now, or those of when the folder was
    last synced: a system is free to write them earlier than it must.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._contents: dict[int, bytes] = {}
        self._names: dict[str, int] = {}
        self._kept: list[int] = []  # descriptors, so that no file gets the number of one that was deleted
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._synced)

    def after_failure(self, folder: Path, *, names_of_now: bool) -> Path:
        """Write what is there after a power failure into `folder`, and return it."""
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
