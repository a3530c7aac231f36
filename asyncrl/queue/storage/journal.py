"""The journal: records from which the next broker restores the queue. Records are opaque bytes here.

    append ─▸ buffer ── flush ─▸ one batch: one write, whole or not at all ── replay after a restart ─▸ records
                                     │
                       overgrown ─▸ compact: a snapshot takes the place of all batches at once

One flush for a burst of requests: their answers are sent after it. A batch is kept entirely or not at all, so that
the events of one request stand or fall together.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgpack

from asyncrl.errors import JournalError

LENGTH = struct.Struct("<I")

BATCH_BYTES = 1 << 20
"""A snapshot is written in batches of about this size."""

GROWTH = 4
"""The journal is overgrown when it is this many times as large as its snapshot …"""

LEAST_OVERGROWN = 4 << 20
"""… and larger than this."""


class Journal(Protocol):
    """One broker writes at a time. JournalError if it is damaged or taken over, OSError if the disk is full."""

    def replay(self) -> Iterator[bytes]:
        """All records that were flushed, in order. To be read to the end, once, before anything is appended."""

    def append(self, record: bytes) -> None:
        """Buffered until `flush`."""

    def flush(self) -> None:
        """Everything appended so far is kept from now on, as well as the implementation promises."""

    def compact(self, records: Iterable[bytes]) -> None:
        """These records replace all that was written or appended before, at once."""

    @property
    def overgrown(self) -> bool:
        """Whether it is time to compact."""

    @property
    def outdated(self) -> bool:
        """Whether its records are of an earlier schema: it must be compacted before anything is appended."""

    def close(self) -> None:
        """Flush and let others have it. Idempotent."""


class NoJournal:
    """Keeps nothing: the queue dies with its broker."""

    overgrown = outdated = False

    def replay(self) -> Iterator[bytes]:
        return iter(())

    def append(self, record: bytes) -> None: ...

    def flush(self) -> None: ...

    def compact(self, records: Iterable[bytes]) -> None: ...

    def close(self) -> None: ...


class Growth:
    """The size of a journal and of its last snapshot, in bytes.

    >>> growth = Growth(least=10)
    >>> growth.snapshot(5); growth.add(16); growth.over
    True
    """

    def __init__(self, least: int) -> None:
        self.size, self._snapshot, self._least = 0, 0, least

    def add(self, nbytes: int) -> None:
        self.size += nbytes

    def snapshot(self, nbytes: int) -> None:
        self.size = self._snapshot = nbytes

    @property
    def over(self) -> bool:
        return self.size > max(GROWTH * self._snapshot, self._least)


class Header:
    """The first record of a journal: its run, and the schema of the records behind it.

    schema: what the records are made of, in words · before: an earlier schema, which is read but not written
    """

    def __init__(self, run: str, schema: str, before: str | None) -> None:
        self._run = run
        self.packed = _packed_header(run, schema)
        self._before = None if before is None else _packed_header(run, before)

    def is_before(self, found: bytes, where: str, remedy: str) -> bool:
        """Whether `found` has the earlier schema. JournalError if it has neither, or is another run's."""
        if found not in (self.packed, self._before):
            try:
                run = msgpack.unpackb(found)["run"]
            except Exception as error:
                raise JournalError(
                    f"{where} begins with {found[:80]!r}, which is no header. Remedy: {remedy}"
                ) from error
            if run != self._run:
                raise JournalError(f"{where} is of run {run!r}, not {self._run!r}")
            raise JournalError(
                f"{where} was written by another version of asyncrl. Remedy: end the run with that version, or {remedy}"
            )
        return found == self._before


def _packed_header(run: str, schema: str) -> bytes:
    return msgpack.packb({"run": run, "schema": zlib.crc32(schema.encode())})


# ---------------------------------------------------------------------- batches of records


def join(records: Sequence[bytes]) -> bytes:
    """One batch.

    >>> list(split(join([b"one", b"", b"three"])))
    [b'one', b'', b'three']
    """
    return b"".join(part for record in records for part in (LENGTH.pack(len(record)), record))


def split(batch: bytes) -> Iterator[bytes]:
    """The records of a batch. JournalError if it is none."""
    at, view = 0, memoryview(batch)
    while at < len(batch):
        start = at + LENGTH.size
        end = start + LENGTH.unpack_from(batch, at)[0] if start <= len(batch) else start
        if end > len(batch):
            raise JournalError(f"a batch of {len(batch)} bytes ends inside a record")
        yield bytes(view[start:end])
        at = end


def batches(records: Iterable[bytes]) -> Iterator[bytes]:
    """Many records as batches of about BATCH_BYTES."""
    batch: list[bytes] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record)
        if size >= BATCH_BYTES:
            yield join(batch)
            batch, size = [], 0
    if batch:
        yield join(batch)
