"""A journal in memory, which outlives the broker that wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from asyncrl.queue.storage.journal import LEAST_OVERGROWN, Growth, batches, join, split


class MemoryJournal:
    """`kept` outlives the broker that wrote it, as a file would."""

    outdated = False

    def __init__(self, kept: list[bytes] | None = None) -> None:
        self.kept = [] if kept is None else kept
        self._growth = Growth(LEAST_OVERGROWN)
        self._buffer: list[bytes] = []

    def replay(self) -> Iterator[bytes]:
        for batch in self.kept:
            self._growth.add(len(batch))
            yield from split(batch)

    def append(self, record: bytes) -> None:
        self._buffer.append(record)

    def flush(self) -> None:
        if self._buffer:
            self.kept.append(join(self._buffer))
            self._growth.add(len(self.kept[-1]))
            self._buffer = []

    def compact(self, records: Iterable[bytes]) -> None:
        self._buffer = []
        self.kept[:] = batches(records)
        self._growth.snapshot(sum(map(len, self.kept)))

    @property
    def overgrown(self) -> bool:
        return self._growth.over

    def close(self) -> None:
        self.flush()
