"""What outlives a broker, in the real files: see kept.py."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

from asyncrl.queue.storage.file_journal import FileJournal
from asyncrl.queue.storage.file_payloads import FilePayloads, PayloadSegment
from asyncrl.queue.storage.store import PayloadKey

from .kept import LEAST_OVERGROWN, Mortal, MortalShelf

SEGMENT_BYTES = 600
"""Two or three groups."""


class FileDisk:
    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="simulated-")

    def journal(self) -> Mortal:
        return MortalFileJournal(Path(self._folder.name), "run", least_overgrown=LEAST_OVERGROWN)

    def shelf(self, lasting: bool) -> MortalShelf:
        return MortalFileShelf(
            Path(self._folder.name, "payloads"), lasting=lasting, segment_bytes=SEGMENT_BYTES
        )

    def find_again(self, rng: random.Random) -> None:
        """The files say."""

    def clear(self) -> None:
        self._folder.cleanup()


class MortalFileJournal(FileJournal):
    def die(self, rng: random.Random) -> None:
        """What is not flushed is torn."""
        if self._buffer:
            whole = os.lseek(self._file, 0, os.SEEK_CUR)
            self.flush()
            torn = os.lseek(self._file, 0, os.SEEK_CUR) - 1
            os.ftruncate(self._file, rng.randint(whole, torn))
        self.close()


class MortalFileShelf(FilePayloads):
    """flushed: bytes of the current segment that stay."""

    _flushed: tuple[PayloadSegment | None, int] = None, 0

    def flush(self) -> None:
        super().flush()
        self._flushed = self._current, 0 if self._current is None else self._current.size

    def die(self, rng: random.Random) -> None:
        if self._current is not None:
            segment, size = self._flushed
            os.ftruncate(
                self._current.file,
                rng.randint(size if segment is self._current else 0, self._current.size),
            )
        self.close()

    @property
    def keys(self) -> set[PayloadKey]:
        return set(self._records)
