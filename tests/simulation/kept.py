"""What outlives a broker of the simulation: a journal and a shelf that may be cut off at any point.

What was flushed stays. Of what was not, the journal keeps nothing, and the shelf any first part, as files do. What was
erased from the shelf may be there again for the next broker. In memory; the same with real files is in files.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from asyncrl.queue.storage.journal import Growth, Journal
from asyncrl.queue.storage.store import Frames, PayloadBackend, PayloadKey
from tests.helpers.queue.memory_journal import MemoryJournal

Reach = Callable[[str], None]
"""Told of every point at which a broker may die; raises to kill it there."""

LEAST_OVERGROWN = 2000
"""Bytes: small, so that journals are compacted all the time."""

Payload = tuple[tuple[bytes, ...], int]
"""Frames, stamp."""


class Mortal(Journal, Protocol):
    def die(self, rng: random.Random) -> None:
        """In the middle of what it does."""


class SimJournal:
    """A journal, and what is told of it.

    flushed: told of the records of a batch once they are kept. begun: told when all of it is forgotten.
    """

    outdated = False

    def __init__(
        self,
        journal: Mortal,
        reach: Reach,
        flushed: Callable[[list[bytes]], None],
        begun: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._reach, self._flushed, self._begun = reach, flushed, begun
        self._records: list[bytes] = []
        self.replay, self.close, self.die = journal.replay, journal.close, journal.die

    def append(self, record: bytes) -> None:
        self._records.append(record)
        self._journal.append(record)

    def flush(self) -> None:
        if not self._records:
            return
        self._reach("shelved")
        self._journal.flush()
        records, self._records = self._records, []
        self._flushed(records)
        self._reach("written")

    def compact(self, records: Iterable[bytes]) -> None:
        snapshot, self._records = list(records), []
        self._journal.compact(snapshot)
        if not snapshot:
            self._begun()
        self._reach("compacted")

    @property
    def overgrown(self) -> bool:
        return self._journal.overgrown


class MortalShelf(PayloadBackend, Protocol):
    @property
    def keys(self) -> set[PayloadKey]: ...

    def die(self, rng: random.Random) -> None:
        """Some of what was not flushed is lost."""


class MortalMemoryJournal(MemoryJournal):
    def __init__(self, kept: list[bytes]) -> None:
        super().__init__(kept)
        self._growth = Growth(LEAST_OVERGROWN)

    def die(self, rng: random.Random) -> None: ...


class Disk:
    """What one broker after another leaves."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.payloads: dict[PayloadKey, Payload] = {}
        self.erased: dict[PayloadKey, Payload] = {}

    def journal(self) -> Mortal:
        return MortalMemoryJournal(self.batches)

    def shelf(self, lasting: bool) -> MortalShelf:
        return SimShelf(self if lasting else Disk())

    def clear(self) -> None: ...

    def find_again(self, rng: random.Random) -> None:
        """Some of what was erased."""
        for key, payload in self.erased.items():
            if rng.random() < 0.5:
                self.payloads.setdefault(key, payload)
        self.erased = {}


class SimShelf:
    """See `asyncrl.queue.storage.store.Shelf`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._there = dict(disk.payloads)
        self._pending: list[tuple[PayloadKey, Payload | None]] = []

    def write(self, key: PayloadKey, frames: Frames, stamp: int) -> None:
        payload = tuple(bytes(frame) for frame in frames), stamp
        self._there[key] = payload
        self._pending.append((key, payload))

    def read(self, key: PayloadKey) -> Frames:
        return self._there[key][0] if key in self._there else ()

    def erase(self, key: PayloadKey) -> None:
        if self._there.pop(key, None) is not None:
            self._pending.append((key, None))

    def flush(self) -> None:
        self._keep(len(self._pending))

    def die(self, rng: random.Random) -> None:
        self._keep(rng.randint(0, len(self._pending)))

    def stamps(self) -> Mapping[PayloadKey, int]:
        return {key: stamp for key, (_, stamp) in self._there.items()}

    @property
    def keys(self) -> set[PayloadKey]:
        return set(self._there)

    @property
    def nbytes(self) -> int:
        return sum(len(frame) for frames, _ in self._there.values() for frame in frames)

    def close(self) -> None: ...

    def _keep(self, count: int) -> None:
        for key, payload in self._pending[:count]:
            if payload is not None:
                self._disk.payloads[key] = payload
            elif key in self._disk.payloads:
                self._disk.erased[key] = self._disk.payloads.pop(key)
        self._pending = []
